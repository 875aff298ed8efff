"""A network during a step that runs once for each microbatch.

begin(m, inputs)    the user's step of microbatch m has come to the network
perform(action)     one action of this rank's table
outputs(m)          what the network's forward returns for microbatch m, on every rank
                    ... the user's step ends, its loss runs backward to these outputs ...
finish()            statistics of BatchNorm, gradients of the network's inputs
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from lightning_cnnpar import tree
from lightning_cnnpar.partition.stage import Program
from lightning_cnnpar.pipeline.ambient import Ambient
from lightning_cnnpar.pipeline.autograd import attach
from lightning_cnnpar.pipeline.batchnorm import DeferredStatistics
from lightning_cnnpar.pipeline.errors import PipelineError
from lightning_cnnpar.pipeline.schedules import Action, Actions
from lightning_cnnpar.pipeline.steps import StepRun

ShareGradient = Callable[[int, Tensor | None, Tensor], Tensor | None]
"""Takes the number of an input, its gradient from this rank's stages and the input; gives its whole gradient."""


@final
class NetworkStep:
    """The calls of one network in one step, one for each microbatch.

    Args:
        run: Runs the actions.
        program: The cut network.
        find_program: Finds the program for other inputs; it has to be the same one.
        statistics: Of the network's BatchNorm layers.
        share: Completes gradients of the network's inputs.
    """

    def __init__(
        self,
        *,
        run: StepRun,
        program: Program,
        find_program: Callable[[tuple[Any, ...], dict[str, Any]], Program],
        statistics: DeferredStatistics,
        share: ShareGradient,
    ) -> None:
        self._run, self._program, self._find_program = run, program, find_program
        self._statistics, self._share = statistics, share
        self._ambients: dict[int, Ambient] = {}
        self._leaves: dict[int, Sequence[Any]] = {}
        self._gradients: dict[int, list[Tensor | None]] = {}

    @property
    def table(self) -> Actions:
        """This rank's actions, in order."""
        return self._run.table

    @property
    def most_in_flight(self) -> int:
        """The most microbatches that this rank has kept activations of at once, summed over its stages."""
        return self._run.most_in_flight

    def begin(self, microbatch: int, args: tuple[Any, ...], kwargs: dict[str, Any], ambient: Ambient) -> None:
        """A microbatch has come to the network.

        Args:
            microbatch: Which one.
            args: Positional arguments of the network's forward.
            kwargs: Its keyword arguments.
            ambient: Autocast and grad mode of the call.

        Raises:
            PipelineError: If it calls the network otherwise than the first one.
        """
        if self._find_program(args, kwargs) is not self._program:
            raise PipelineError(
                f"Microbatch {microbatch} calls the network otherwise than microbatch 0 in {self._run.identity.text}:"
                " its inputs have another structure or size. With this schedule the step runs once for each"
                " microbatch; use schedule='gpipe', which runs it once for the whole batch."
            )
        leaves, _ = tree.flatten((args, kwargs))
        self._leaves[microbatch], self._ambients[microbatch] = leaves, ambient
        self._run.provide(microbatch, leaves)

    def perform(self, action: Action) -> None:
        """Run one action."""
        if action.kind == "F":
            with self._ambients[action.microbatch].applied(), self._statistics.recording():
                self._statistics.begin(action.stage)
                self._run.forward(action)
        elif action.kind == "W":
            self._run.weights(action)
        else:
            self._run.give(action.microbatch, self._gradients_of(action.microbatch))
            with self._statistics.ignoring():
                self._run.backward(action)

    def outputs(self, microbatch: int) -> Any:
        """What the network's forward returns, on every rank; its gradients are noted when they come."""
        outputs, differentiable = self._run.take(microbatch)
        attached = attach(lambda gradients, anchor: self._note(microbatch, gradients), outputs, differentiable, [])
        return self._program.assemble(attached, self._leaves[microbatch])

    def has_graph_before(self, microbatch: int) -> bool:
        """Whether something before the network gets a gradient through it."""
        return bool(self._inputs(microbatch))

    def finish(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """End the step; for each microbatch, inputs of the network that get gradients, and these gradients."""
        self._run.finish_sends()
        self._statistics.update()
        passed = []
        for m in sorted(self._leaves):
            inputs = self._inputs(m)
            shared = [(leaf, self._share(i, self._run.input_gradient(m, i), leaf)) for i, leaf in inputs.items()]
            known = [(leaf, gradient) for leaf, gradient in shared if gradient is not None]
            passed.append(([leaf for leaf, _ in known], [gradient for _, gradient in known]))
        return passed

    def _inputs(self, microbatch: int) -> dict[int, Tensor]:
        leaves = self._leaves[microbatch]
        return {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad}

    def _gradients_of(self, microbatch: int) -> list[Tensor | None]:
        return self._gradients.get(microbatch, [None] * self._program.num_outputs)

    def _note(self, microbatch: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        if torch.is_grad_enabled():
            raise PipelineError(
                f"`create_graph=True` asked for gradients of gradients through {self._run.identity.text}. A network"
                f" that is cut into stages gives first gradients only. Leave such terms (gradient penalties) out, or"
                f" use `pipeline_parallel_size=1`."
            )
        before = self._gradients_of(microbatch)
        self._gradients[microbatch] = [
            old if new is None else new if old is None else old + new
            for old, new in zip(before, gradients, strict=True)
        ]
        return []
