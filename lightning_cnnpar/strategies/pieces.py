"""ZeRO during a run: when parameters are whole, when they are pieces, and who is told.

step begins        whole       (stage 3: their shape; values come when the network uses them)
backward ends      pieces      so that clipping, hooks and the optimizer see this rank's part
optimizer stepped  at rest     (stages 1, 2: whole; stage 3: pieces)
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_cnnpar.data_parallel.accumulation import NamedParameter
from lightning_cnnpar.data_parallel.gathering import Gathering, groups_of
from lightning_cnnpar.data_parallel.sharding import Sharding
from lightning_cnnpar.mesh import Mesh, create_data_group, meet
from lightning_cnnpar.partition.split import Partitioner
from lightning_cnnpar.partition.stage import Program

Optimizers = Callable[[], list[torch.optim.Optimizer]]


@final
class Pieces:
    """The parameters of this rank's stage, cut over the replicas that hold it. Every rank of the world makes one.

    Args:
        stage: 1, 2 or 3.
        mesh: The grid; more than one replica.
        optimizers: The optimizers of the run, at the time of the call.
        copies: Whole copies of the module that callbacks hold.

    Attributes:
        sharding: The units and phases.
    """

    def __init__(
        self, stage: int, mesh: Mesh, *, optimizers: Optimizers, copies: Callable[[], list[nn.Module]]
    ) -> None:
        self.sharding = Sharding(stage, mesh, create_data_group(mesh))
        self._mesh, self._optimizers, self._copies = mesh, optimizers, copies
        self._gathering = None if self.sharding.keeps_whole else Gathering(self.sharding)
        self.sharding.attach(optimizers())

    @property
    def follows_calls(self) -> bool:
        """Whether values come when a network uses them, so that its calls have to be followed inside."""
        return self._gathering is not None

    # ---- cutting ---------------------------------------------------------------------------------------------------

    def cut_all(self, named: Sequence[NamedParameter]) -> None:
        """Cut parameters in the order of a module, whatever calls them."""
        self.sharding.add([[one] for one in named])
        self.sharding.slice_states(self._optimizers())

    def cut_network(self, root: nn.Module, called: Iterable[str], named: Iterable[NamedParameter]) -> None:
        """Cut the parameters of a network.

        Args:
            root: The network.
            called: Names of the submodules that this rank's stages call, in order.
            named: Its parameters on this rank.
        """
        left = {id(parameter): (name, parameter) for name, parameter in named if not self.is_piece(parameter)}
        self.sharding.add(groups_of(root, called, left))
        for copy in self._copies():
            self.sharding.add_copy(copy)
        self.sharding.slice_states(self._optimizers())

    def is_piece(self, parameter: Tensor) -> bool:
        """Whether a parameter is cut, so that this rank has only a piece of its gradient for the optimizer."""
        return self.sharding.slot(parameter) is not None

    # ---- moments of a step -----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """The user's step begins, or calls a network."""
        self.sharding.to_whole()

    def begin_backward(self) -> None:
        """A backward pass begins; with stage 3 it waits for the other replicas at once, and not in a gathering."""
        self.sharding.to_whole()
        if self.follows_calls:
            meet(self._mesh, "runs a backward pass")

    def before_update(self) -> None:
        """An optimizer, or what looks at gradients, comes next."""
        self.sharding.to_pieces()

    def end_step(self) -> None:
        """The optimizer has stepped, or a step without gradients is over."""
        self.sharding.rest()

    # ---- calls -----------------------------------------------------------------------------------------------------

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        """Code inside gets an error by name when it reads values that are not here."""
        return contextlib.nullcontext() if self._gathering is None else self._gathering.watching()

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """Code inside looks at the shapes of parameters only."""
        return contextlib.nullcontext() if self._gathering is None else self._gathering.tracing()

    def announce_call(self, what: str) -> None:
        """A network is called: with stage 3, replicas that do something else are told so, where they would hang."""
        if self.follows_calls:
            meet(self._mesh, what)

    def programs(self, root: nn.Module, partitioner: Partitioner) -> Any:
        """The partitioner, with programs that gather what they use."""
        return partitioner if self._gathering is None else _Gathered(root, partitioner, self._gathering)

    def using(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Code inside calls a module that is not a network of its own."""
        return contextlib.nullcontext() if self._gathering is None else self._gathering.using(module)

    # ---- end -------------------------------------------------------------------------------------------------------

    def restore(self, *, gather: bool) -> None:
        """Make ordinary parameters of the pieces; see `Sharding.restore`."""
        if self._gathering is not None:
            self._gathering.forget()
        self.sharding.restore(gather=gather)

    @property
    def gathered_bytes(self) -> int:
        """Most bytes of gathered values at a time, so far."""
        return 0 if self._gathering is None else self._gathering.peak_bytes


class _Gathered:
    """Programs whose stages gather what they use."""

    def __init__(self, root: nn.Module, partitioner: Partitioner, gathering: Gathering) -> None:
        self._root, self._partitioner, self._gathering = root, partitioner, gathering

    def program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        return self._gathering.around(self._root, self._partitioner.program(args, kwargs))
