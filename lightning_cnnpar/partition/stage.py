"""What a cut network is: stages as code over the original modules, and the program that joins them.

A network with one skip connection, cut in three, looks like this; numbers are positions in topological order:

    inputs ──► [stage 0] ──a──► [stage 1] ──b──► [stage 2] ──► outputs ──► Program.assemble
                   └────────────skip───────────────▲

Stage 0 sends `a` and `skip`, stage 1 receives `a` and sends `b`, stage 2 receives `b` and `skip`: values go straight
from the stage that makes them to each stage that reads them. A stage holds no module and no parameter. It is a function
that looks its modules up on the network at run time, so names, hooks and `state_dict` stay as they are.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

StageFunction = Callable[..., tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A consecutive part of a network's forward.

    Attributes:
        index: Position among the stages, in topological order.
        rank: Pipeline rank that runs the stage.
        inputs: Which leaves of the network's flattened input (`tree.flatten((args, kwargs))`) the stage reads.
        receives: Names of the values that come from earlier stages. Tensors only.
        sends: Names of the values that later stages receive. Tensors only.
        outputs: Which of the network's output tensors the stage makes.
        modules: Submodules called here, by their dotted names in the network, in the order of their first call.
        function: Takes the network, the inputs and the received values, each in order; returns sent values and outputs.
    """

    index: int
    rank: int
    inputs: tuple[int, ...]
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    outputs: tuple[int, ...]
    modules: tuple[str, ...]
    function: StageFunction = dataclasses.field(repr=False, compare=False)

    def __call__(
        self, root: nn.Module, inputs: Sequence[Any], received: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Run the stage on one microbatch.

        Args:
            root: The network that was cut.
            inputs: The leaves named by `self.inputs`, in that order (not all leaves of the network's input).
            received: The values named by `self.receives`, in that order.

        Returns:
            The values of `self.sends` and those of `self.outputs`, in their order.
        """
        return self.function(root, *inputs, *received)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One network, for one set of training flags and one call signature.

    Attributes:
        stages: In topological order: a stage receives from earlier stages only.
        num_outputs: How many output tensors the stages make together.
        assembly: Builds what the network's forward returns from the output tensors and the flattened inputs.
        is_batched: Whether the network runs with another size of dimension 0, so that this may be the batch.
    """

    stages: tuple[Stage, ...]
    num_outputs: int
    is_batched: bool = True
    assembly: Callable[[Sequence[Tensor], Sequence[Any]], Any] = dataclasses.field(repr=False, compare=False)

    def producer(self, value: str) -> int:
        """Index of the stage that sends `value`."""
        return next(stage.index for stage in self.stages if value in stage.sends)

    def consumers(self, value: str) -> tuple[int, ...]:
        """Indices of the stages that receive `value`."""
        return tuple(stage.index for stage in self.stages if value in stage.receives)

    def output_producer(self, output: int) -> int:
        """Index of the stage that makes the output tensor numbered `output`."""
        return next(stage.index for stage in self.stages if output in stage.outputs)

    def assemble(self, outputs: Sequence[Tensor], inputs: Sequence[Any]) -> Any:
        """What the network's forward returns: its container, around `outputs`.

        Args:
            outputs: All output tensors, numbered 0 to `num_outputs` - 1.
            inputs: All leaves of the network's flattened input, for outputs that are inputs handed through.
        """
        return self.assembly(outputs, inputs)
