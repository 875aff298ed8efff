"""One network call for each microbatch, as the schedules with few microbatches in flight need it.

    provide(m)      the inputs of microbatch m are known
    forward, backward, weights      one action of the table
    take(m)         the outputs of microbatch m are here, on every rank
    give(m)         the gradients of these outputs are known

The order of actions is that of the table; who drives it runs the user's code in between.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from lightning_cnnpar.pipeline.errors import PipelineError
from lightning_cnnpar.pipeline.executor import Executor, Site, take_gradient
from lightning_cnnpar.pipeline.gradients import GradientInbox, GradientOutbox
from lightning_cnnpar.pipeline.outputs import JoinedOutputs
from lightning_cnnpar.pipeline.routes import Bundle, Routes
from lightning_cnnpar.pipeline.schedules import Action, Actions
from lightning_cnnpar.pipeline.settling import SendKey
from lightning_cnnpar.pipeline.transport import Identity
from lightning_cnnpar.pipeline.weight_gradients import WeightGradients
from lightning_cnnpar.pipeline.wire import Meta

# One is worked on while the next one comes in.
_AHEAD = 1


@final
class StepRun(Executor):
    """The network calls of all microbatches of one step, on this rank.

    Args:
        site: What calls share.
        identity: Which call this is.
        num_outputs: Tensors that the network makes.
        routes: Its routes on this rank.
        table: This rank's actions.
        settled: Sends that are done before each action.
        sizes: Samples in each microbatch.

    Attributes:
        table: This rank's actions, in order.
        most_in_flight: The most microbatches that this rank has kept activations of at once, summed over its stages.
    """

    def __init__(
        self,
        *,
        site: Site,
        identity: Identity,
        num_outputs: int,
        routes: Routes,
        table: Actions,
        settled: Mapping[Action, Sequence[SendKey]],
        sizes: Sequence[int],
    ) -> None:
        outputs = [JoinedOutputs(num_outputs, (size,), site.device) for size in sizes]
        super().__init__(
            site=site,
            identity=identity,
            routes=routes,
            sizes=sizes,
            place=lambda number, m, meta: outputs[m].expect(number, 0, meta),
            ahead=_AHEAD,
        )
        self.table = table
        self.most_in_flight = 0
        self._in_flight = 0
        self._settled = settled
        self._outputs = outputs
        self._leaves: dict[int, Sequence[Any]] = {}
        self._given: dict[int, Sequence[Tensor | None]] = {}
        self._splits = any(action.kind == "W" for action in table)
        self._weights: dict[tuple[int, int], WeightGradients] = {}
        self._gradient_inbox = GradientInbox(
            site.link,
            routes.gradients_from,
            self._metas,
            device=site.device,
            wire_dtype=site.wire_dtype,
            ahead=_AHEAD,
        )
        self._gradient_outbox = GradientOutbox(site.link, site.device, site.wire_dtype)

    def provide(self, microbatch: int, leaves: Sequence[Any]) -> None:
        """Take in the leaves of a microbatch's input; tensors that require a gradient are cut off their graph."""
        self._leaves[microbatch] = [
            leaf.detach().requires_grad_() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf
            for leaf in leaves
        ]

    def forward(self, action: Action) -> None:
        """Run a forward action."""
        self._begin(action)
        self._forward(action)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)

    def take(self, microbatch: int) -> tuple[list[Tensor], list[bool]]:
        """Wait for the outputs of a microbatch; also says which of them the loss may differentiate."""
        self._site.link.enter(self.identity)
        self._take_outputs([microbatch])
        outputs = self._outputs[microbatch]
        differentiable = outputs.requires_grad()
        return outputs.take(), differentiable

    def give(self, microbatch: int, gradients: Sequence[Tensor | None]) -> None:
        """Take in the gradients of a microbatch's outputs."""
        self._given[microbatch] = gradients

    def backward(self, action: Action) -> None:
        """Run a backward action, or the half of one that other stages wait for."""
        self._begin(action)
        m = action.microbatch
        if m not in self._given:
            raise PipelineError(f"{action} of {self.identity.text} came before the loss of its microbatch.")
        weights = self._weights.get((action.stage, m))
        if weights is not None:
            weights.defer(True)
        self._backward(action, self._given[m], self._gradient_inbox, self._gradient_outbox, keep=False, parameters=True)
        if not self._splits:
            self._in_flight -= 1

    def weights(self, action: Action) -> None:
        """Run the half of a backward that nobody waits for."""
        self._begin(action)
        with torch.no_grad(), self._told_where(action):
            self._weights.pop((action.stage, action.microbatch)).compute()
        self._in_flight -= 1

    def input_gradient(self, microbatch: int, index: int) -> Tensor | None:
        """The gradient of an input of a microbatch from this rank's stages; `None` if they don't read it."""
        leaf = self._leaves[microbatch][index]
        return take_gradient(leaf) if leaf.is_leaf else None

    def finish_sends(self) -> None:
        """All actions are done: wait until what was sent has been received."""
        self._site.link.flush()

    def _begin(self, action: Action) -> None:
        self._site.link.enter(self.identity)
        for key in self._settled[action]:
            self._site.link.settle(key)

    def _mode(self, action: Action) -> contextlib.AbstractContextManager[Any]:
        if not self._splits:
            return contextlib.nullcontext()
        weights = self._weights[action.stage, action.microbatch] = WeightGradients()
        return weights

    def _outputs_of(self, microbatch: int) -> JoinedOutputs:
        return self._outputs[microbatch]

    def _input(self, index: int, microbatch: int) -> Any:
        return self._leaves[microbatch][index]

    def _metas(self, bundle: Bundle, microbatch: int) -> Sequence[Meta] | None:
        metas = self._sent_metas.get((bundle, microbatch))
        return None if metas is None else list(metas.values())
