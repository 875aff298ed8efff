"""The networks of a LightningModule: found by what the step calls, cut at the first call, whole again at the end.

first outermost call of a submodule ──► trace and cut ──► own stage stays, the rest becomes placeholders
later calls                         ──► the collective call of `pipeline.network`
end of the run                      ──► values of all stages come back, nothing is intercepted any more
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cnnpar._compat import tensor_slots
from lightning_cnnpar.checkpoint.gather import broadcast_from_owners
from lightning_cnnpar.config import ConfigurationError, HybridOptions
from lightning_cnnpar.data_parallel.accumulation import NamedParameter
from lightning_cnnpar.data_parallel.comm_hook import CommHook
from lightning_cnnpar.data_parallel.replicate import GradientReducer
from lightning_cnnpar.data_parallel.sharded_reducer import ShardedReducer
from lightning_cnnpar.mesh import Mesh
from lightning_cnnpar.partition.foreign import is_foreign
from lightning_cnnpar.partition.ownership import (
    Ownership,
    global_names,
    local_names,
    named_tensors,
    release_foreign,
    replace_in_optimizer,
    restore_whole,
)
from lightning_cnnpar.partition.split import Partitioner, PartitionError, TooManyStagesError, UntraceableError
from lightning_cnnpar.pipeline.network import PipelineNetwork
from lightning_cnnpar.plan import ParallelPlan, StagePlan
from lightning_cnnpar.strategies.interception import InterceptedForward, intercept
from lightning_cnnpar.strategies.microbatch_steps import MicrobatchSteps
from lightning_cnnpar.strategies.pieces import Pieces
from lightning_cnnpar.strategies.placement import place_alike

log = logging.getLogger(__name__)

# A submodule with less than this share of all parameters is not worth a pipeline of its own.
SMALL_SHARE = 0.05
OUTSIDE = "a call outside of a step"


@dataclasses.dataclass
class _Found:
    """A network that the step called.

    Attributes:
        name: Dotted name in the module, or the class's for the module itself.
        partitioner: Cuts it.
        pipeline: The collective call.
        placed: How many tensors of it have been placed.
    """

    name: str
    partitioner: Partitioner
    pipeline: PipelineNetwork
    placed: int = -1


class Networks:
    """All that is distributed of one LightningModule on one rank.

    Args:
        module: The user's module, whole.
        mesh: The grid of the run.
        options: What the user asked for.
        num_microbatches: M, resolved.
        device: Where this rank computes.
        copies: Finds whole copies of the module that callbacks hold (weight averages); they are cut alike.
        optimizers: The optimizers of the run, at the time of the call.
        wire_dtype: Type of activations between stages; `None` as they are.
        announce: Shows a line of text to the user, once for the run.
        hook: How gradients are averaged over replicas; `None`: as they are.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        mesh: Mesh,
        options: HybridOptions,
        num_microbatches: int,
        device: torch.device,
        copies: Callable[[], list[nn.Module]],
        optimizers: Callable[[], list[torch.optim.Optimizer]],
        wire_dtype: torch.dtype | None = None,
        announce: Callable[[str], None] = log.info,
        hook: CommHook | None = None,
    ) -> None:
        self._module = module
        self._mesh = mesh
        self._options = options
        self._num_microbatches = num_microbatches
        self._device = device
        self._copies = copies
        self._optimizers = optimizers
        self._wire_dtype = wire_dtype
        self._announce = announce
        self._hook = hook
        self._names: dict[int, str] = {id(submodule): name for name, submodule in module.named_modules()}
        self._total = _size(module)
        self._shadows: list[InterceptedForward] = []
        self._found: dict[int, _Found] = {}
        # With how many tensors were placed when that was decided.
        self._left_whole: dict[int, int] = {}
        self._depth = 0
        self._gradients_wanted = False
        self._is_cut = False
        self._reducer: GradientReducer | ShardedReducer | None = None
        self.pieces: Pieces | None = None
        self._stage_wait = self._gradient_wait = 0.0
        self.ownership = Ownership(mesh.pipeline_rank)
        self.label = OUTSIDE
        self.steps: MicrobatchSteps | None = None

    # ---- life ------------------------------------------------------------------------------------------------------

    def install(self, *, reduce_gradients: bool) -> None:
        """Start to intercept calls, and to reduce gradients if this run trains."""
        self._check_network_name()
        self._gradients_wanted = reduce_gradients
        if reduce_gradients and self._options.zero_stage and self._mesh.data_size > 1:
            stage = self._options.zero_stage
            self.pieces = Pieces(stage, self._mesh, optimizers=self._optimizers, copies=self._copies)
        if self._cuts or self.pieces is not None:
            self._shadows = intercept(self._module, self)
        # Pieces are cut when the optimizers have their states: with the first step.
        if self._mesh.pipeline_size == 1 and self.pieces is None:
            self.rebuild_reducer()

    @property
    def _cuts(self) -> bool:
        """Whether calls of networks are followed inside."""
        follows = self.pieces is not None and self.pieces.follows_calls
        return self._mesh.pipeline_size > 1 or self._num_microbatches > 1 or follows

    def make_whole(self) -> None:
        """Give every rank the values of all stages and stop intercepting; a collective of the replica."""
        self._uninstall()
        if self.pieces is not None:
            self.pieces.restore(gather=True)
        replaced = self._fill(self._module)
        for copy in self._copies():
            self._fill(copy)
        for optimizer in self._optimizers():
            replace_in_optimizer(optimizer, replaced)
        self._is_cut = False

    def abandon(self) -> None:
        """Stop without the other ranks, after an error: placeholders and pieces stay."""
        self._uninstall()
        if self.pieces is not None:
            self.pieces.restore(gather=False)

    def _uninstall(self) -> None:
        self._remove_shadows()
        self._drop_reducer()
        self._stage_wait = self.waits()[0]
        self._found = {}
        self._left_whole = {}

    def _remove_shadows(self) -> None:
        for shadow in self._shadows:
            shadow.remove()
        self._shadows = []

    @contextlib.contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """The module with the weights of all stages on this rank, for the time of the context.

        Every rank of the replica enters it. Calls inside run on this rank alone. Writes to other stages' weights are
        lost.
        """
        intercepted = bool(self._shadows)
        self._remove_shadows()
        held = [slot for slot in tensor_slots(self._module) if is_foreign(slot[2])]
        try:
            with self.whole_values():
                self._fill(self._module)
                yield self._module
        finally:
            # The placeholders themselves come back: optimizers refer to them.
            for store, key, placeholder in held:
                store[key] = placeholder
            if intercepted:
                self._shadows = intercept(self._module, self)

    def _fill(self, module: nn.Module) -> dict[int, Tensor]:
        if not self._is_cut:
            return {}
        placed = {name: tensor for name, tensor in named_tensors(module) if self.ownership.owner(name) is not None}
        values = broadcast_from_owners(placed, self._mesh, self.ownership.owners)
        return restore_whole(module, values)

    # ---- calls -----------------------------------------------------------------------------------------------------

    @property
    def intercepts(self) -> bool:
        """Whether the next call of a module is an outermost one of this run."""
        return self._depth == 0 and bool(self._shadows)

    @contextlib.contextmanager
    def undistributed(self) -> Iterator[None]:
        """Calls inside are those of a network that is being run: not intercepted."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def step(self, label: str) -> Iterator[None]:
        """Names where the user's code is, for messages of a network call inside."""
        before, self.label = self.label, label
        try:
            with contextlib.nullcontext() if self.pieces is None else self.pieces.watching():
                yield
        finally:
            self.label = before

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """An outermost call of `module`: the collective call of a network, or plainly its forward."""
        if self.label == OUTSIDE and not self._is_cut:
            # A summary or a graph of the model, say: all weights are still here, and the other ranks may not call it.
            with self.undistributed():
                return forward(*args, **kwargs)
        if self.pieces is not None:
            self.pieces.begin_step()
        if not self._cuts:
            return forward(*args, **kwargs)
        network = self._network_of(module)
        if network is not None:
            if self.pieces is not None:
                self.pieces.announce_call(f"calls network {network.name!r} in {self.label}")
            with self.undistributed():
                placed = self._is_placed(module, network, args, kwargs)
            if placed and self.steps is not None and self.steps.is_running:
                return self.steps.call(network.pipeline, args, kwargs)
            if placed:
                with self.undistributed():
                    return network.pipeline(args, kwargs, label=self.label)
        return self._call_plainly(module, forward, args, kwargs)

    def _is_placed(self, module: nn.Module, network: _Found, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Cut the network for these inputs if need be; whether it could be cut."""
        try:
            with contextlib.nullcontext() if self.pieces is None else self.pieces.tracing():
                if network.placed < 0:
                    place_alike(network.partitioner, args, kwargs, self._mesh)
                network.partitioner.program(args, kwargs)
        except PartitionError as error:
            if not self._may_leave_whole(module, error):
                raise
            return False
        self._place(module, network)
        return True

    def _call_plainly(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the forward on every rank. What it calls is intercepted if it encloses the network, else not."""
        if self._is_transparent(module):
            return forward(*args, **kwargs)
        gathered = contextlib.nullcontext() if self.pieces is None else self.pieces.using(module)
        with self.undistributed(), gathered:
            return forward(*args, **kwargs)

    def _is_transparent(self, module: nn.Module) -> bool:
        wanted = self._options.network
        if wanted is not None:
            return module is not self._module.get_submodule(wanted)
        return module is self._module

    def _network_of(self, module: nn.Module) -> _Found | None:
        key = id(module)
        if key in self._found:
            return self._found[key]
        if not self._has_stages(module):
            self._left_whole[key] = len(self.ownership.owners)
            return None
        self._found[key] = self._make_network(module)
        return self._found[key]

    def _has_stages(self, module: nn.Module) -> bool:
        """Whether a module is cut when it is called: it is large enough, or a network around it placed its parts."""
        decided_with = self._left_whole.get(id(module))
        if decided_with is None and self._worth_cutting(module):
            return True
        if decided_with == len(self.ownership.owners) or module is self._module:
            return False
        wanted = self._options.network
        is_inside = wanted is None or self._names[id(module)].startswith(f"{wanted}.")
        return is_inside and bool(local_names(self._module, module, self.ownership.owners))

    def _worth_cutting(self, module: nn.Module) -> bool:
        if self._options.network is not None:
            return self._names[id(module)] == self._options.network
        if self._num_microbatches > 1 and self._mesh.pipeline_size == 1:
            return True
        return _size(module) >= SMALL_SHARE * self._total

    def _make_network(self, module: nn.Module) -> _Found:
        name = self._names[id(module)] or type(module).__name__
        partitioner = Partitioner(
            module,
            self._mesh.pipeline_size,
            balance=self._options.balance,
            cut_points=self._options.cut_points,
            owners=local_names(self._module, module, self.ownership.owners),
            name=name,
            stages_per_rank=self._options.stages_per_rank,
        )
        pipeline = PipelineNetwork(
            module,
            partitioner if self.pieces is None else self.pieces.programs(module, partitioner),
            self._mesh,
            num_microbatches=self._num_microbatches,
            name=name,
            gradient_sync=self,
            wire_dtype=self._wire_dtype,
            deferred_batch_norm=self._options.deferred_batch_norm,
            device=self._device,
            activation_checkpointing=self._options.activation_checkpointing,
        )
        return _Found(name, partitioner, pipeline)

    def _may_leave_whole(self, module: nn.Module, error: PartitionError) -> bool:
        """Whether a network that can't be cut may run on every rank: the module around the others, or a lesser one."""
        del self._found[id(module)]
        self._left_whole[id(module)] = len(self.ownership.owners)
        if self._options.network is not None:
            return False
        if module is self._module:
            if isinstance(error, UntraceableError) and any(True for _ in module.children()):
                self._announce(
                    f"{type(module).__name__}.forward can't be cut as a whole ({error.reason}); it runs on every rank"
                    f" and the submodules that it calls are cut one by one. One traceable forward around them would"
                    " overlap better."
                )
                return True
            return False
        return isinstance(error, TooManyStagesError) and _size(module) < 0.5 * self._total

    # ---- placement -------------------------------------------------------------------------------------------------

    def _place(self, module: nn.Module, network: _Found) -> None:
        """Carry out what the partition of `network` newly placed; nothing on later calls."""
        partitioner = network.partitioner
        if network.placed == len(partitioner.owners):
            return
        network.placed = len(partitioner.owners)
        owners = global_names(self._module, module, partitioner.owners)
        tied = global_names(self._module, module, dict.fromkeys(partitioner.shared))
        if not self.ownership.extend(owners, tied):
            return
        self._is_cut = self._mesh.pipeline_size > 1
        first = len(self._found) == 1
        replaced = release_foreign(self._module, self.ownership)
        for copy in self._copies():
            release_foreign(copy, self.ownership)
        for optimizer in self._optimizers():
            replace_in_optimizer(optimizer, replaced)
        if self.pieces is not None:
            rank = self._mesh.pipeline_rank
            called = [name for row in partitioner.table() if row.rank == rank for name in row.modules]
            self.pieces.cut_network(module, called, self._placed_here())
        self.rebuild_reducer()
        self._announce(self.plan().table())
        if not first and self._mesh.pipeline_size > 1:
            self._announce("The step calls several networks; one `forward` around them would overlap better.")

    def plan(self) -> ParallelPlan:
        """The layout as it is now."""
        stages = tuple(
            StagePlan(
                network=network.name,
                stage=row.stage,
                rank=row.rank,
                modules=tuple(row.modules),
                parameters=row.parameters,
                flops=int(row.flops or 0),
            )
            for network in self._found.values()
            for row in network.partitioner.table()
        )
        return ParallelPlan(
            pipeline_parallel_size=self._mesh.pipeline_size,
            data_parallel_size=self._mesh.data_size,
            schedule=self._options.schedule,
            num_microbatches=self._num_microbatches,
            stages=stages,
            stages_per_rank=self._options.stages_per_rank,
        )

    def _check_network_name(self) -> None:
        wanted = self._options.network
        if wanted is not None and wanted not in self._names.values():
            known = ", ".join(repr(name) for name in self._names.values() if name and name.count(".") < 2)
            raise ConfigurationError(f"network={wanted!r} is not a submodule. There are: {known}.")

    # ---- gradients -------------------------------------------------------------------------------------------------

    def rebuild_reducer(self) -> None:
        """Reduce the gradients of the parameters that are here now."""
        self._drop_reducer()
        if not self._gradients_wanted or self._mesh.world_size == 1:
            return
        staged, everywhere, tied = self._parameters_here()
        if self.pieces is None:
            self._reducer = GradientReducer(
                staged, mesh=self._mesh, world_parameters=everywhere, summed_parameters=tied, hook=self._hook
            )
            return
        everywhere += [named for named in staged if not self.pieces.is_piece(named[1])]
        self._reducer = ShardedReducer(
            self.pieces.sharding, mesh=self._mesh, world_parameters=everywhere, summed_parameters=tied, hook=self._hook
        )

    def _parameters_here(self) -> tuple[list[NamedParameter], list[NamedParameter], list[NamedParameter]]:
        """Those of this rank's stage, those outside of networks, and those tied between stages."""
        staged, everywhere, tied = [], [], []
        for name, parameter in self._module.named_parameters():
            if is_foreign(parameter):
                continue
            if name in self.ownership.tied:
                tied.append((name, parameter))
            elif self._mesh.pipeline_size == 1 or self.ownership.owner(name) is not None:
                staged.append((name, parameter))
            else:
                everywhere.append((name, parameter))
        return staged, everywhere, tied

    def _placed_here(self) -> list[NamedParameter]:
        """Parameters of networks that this rank alone of its replica holds."""
        return [named for named in self._parameters_here()[0] if self.ownership.owner(named[0]) is not None]

    def begin_step(self) -> None:
        """The user's code may use parameters from here on."""
        if self.pieces is None:
            return
        if not self._cuts and self._gradients_wanted and not self.pieces.sharding.units:
            self.pieces.cut_all(self._parameters_here()[0])
            self.rebuild_reducer()
        self.pieces.begin_step()

    def begin_evaluation(self) -> None:
        """As `begin_step`, in validation, test and prediction."""
        if self.pieces is not None:
            self.pieces.begin_step()

    def end_step(self) -> None:
        """The optimizer has stepped, or a step without gradients is over."""
        if self.pieces is not None:
            self.pieces.end_step()

    def before_update(self) -> None:
        """An optimizer, or what looks at gradients, comes next."""
        if self.pieces is not None:
            self.pieces.before_update()

    def whole_values(self) -> contextlib.AbstractContextManager[None]:
        """Parameters of this rank's stage have all their values inside; every rank of the stage enters it."""
        return contextlib.nullcontext() if self.pieces is None else self.pieces.sharding.whole_values()

    def _drop_reducer(self) -> None:
        if self._reducer is not None:
            self._gradient_wait = self.waits()[1]
            self._reducer.remove()
            self._reducer = None

    @property
    def gradient_order(self) -> list[str]:
        """Names of the parameters whose gradients are averaged here, in the order in which they are expected."""
        return [] if self._reducer is None else self._reducer.order

    def expect_backward(self) -> None:
        """A backward pass is about to start, perhaps of a step that called no network."""
        if self._reducer is None:
            self.rebuild_reducer()
        if self.pieces is not None:
            self.pieces.begin_backward()

    def begin_backward(self, passes: int = 1) -> None:
        """A backward pass has reached a network, and runs autograd so often through this rank's stages."""
        if self._reducer is not None:
            self._reducer.begin_backward(passes)

    def ready_enabled(self, enabled: bool) -> None:
        """Whether gradients that are accumulated now are the last of this backward pass."""
        # A call inside of one microbatch's step doesn't know that other microbatches follow.
        if self._reducer is not None and not (self.steps is not None and self.steps.is_running):
            self._reducer.ready_enabled(enabled)

    @contextlib.contextmanager
    def one_round(self) -> Iterator[None]:
        """All backward passes inside are one for the averaging of gradients."""
        if self._reducer is None:
            self.rebuild_reducer()
        if self._reducer is None:
            yield
            return
        with self._reducer.one_round():
            yield

    def final_gradients(self, enabled: bool) -> None:
        """Whether gradients that come now are the last of their parameters in this step."""
        if self._reducer is not None:
            self._reducer.ready_enabled(enabled)

    @property
    def pipeline_size(self) -> int:
        """P."""
        return self._mesh.pipeline_size

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only."""
        if self._reducer is None:
            yield
            return
        with self._reducer.no_sync():
            yield

    def waits(self) -> tuple[float, float]:
        """Seconds that this rank has waited so far for other stages, and for gradients of other replicas."""
        gradients = self._gradient_wait
        if self._reducer is not None:
            gradients += self._reducer.statistics.seconds_waited
        return self._stage_wait + sum(network.pipeline.seconds_waited for network in self._found.values()), gradients

    def refuse_chosen_inputs(self, inputs: Iterable[Tensor]) -> None:
        """Refuse `backward(inputs=...)` with parameters of a cut network: its graph ends at the call.

        Raises:
            ConfigurationError: With the name of the first of them.
        """
        chosen = {id(tensor) for tensor in inputs}
        for name, parameter in self._module.named_parameters():
            if id(parameter) in chosen and self.ownership.owner(name) is not None:
                raise ConfigurationError(
                    f"backward(inputs=...) names {name!r}, a parameter of a network that is cut into stages. To"
                    " autograd such a network is one operation, which fills the gradients of all its trainable"
                    " parameters. Call backward without `inputs`, and freeze what should get no gradient with"
                    " `toggle_optimizer` or `requires_grad_(False)`."
                )

    def reset_step(self) -> None:
        """Forget network calls whose backward never came."""
        for network in self._found.values():
            network.pipeline.reset()


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
