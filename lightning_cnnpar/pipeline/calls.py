"""A network call for the whole batch: all microbatches forward, and later all of them backward."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from lightning_cnnpar.partition.stage import Program
from lightning_cnnpar.pipeline import wire
from lightning_cnnpar.pipeline.errors import PipelineError
from lightning_cnnpar.pipeline.exchange import receive, take
from lightning_cnnpar.pipeline.executor import Executor, Site, leaf_of, take_gradient
from lightning_cnnpar.pipeline.gradients import GradientInbox, GradientOutbox
from lightning_cnnpar.pipeline.microbatch import is_batched, split_leaf
from lightning_cnnpar.pipeline.outputs import JoinedOutputs
from lightning_cnnpar.pipeline.routes import Routes
from lightning_cnnpar.pipeline.schedules import Action
from lightning_cnnpar.pipeline.transport import Identity


@final
class Run(Executor):
    """One network call for the whole batch: all forward passes, and later all backward passes.

    Args:
        site: What calls share.
        identity: Which call this is.
        program: The cut network.
        routes: Its routes on this rank.
        leaves: Leaves of the network's input, for the whole batch.
        batch_size: Dimension 0 of those that are cut.
        sizes: Samples in each microbatch.
    """

    def __init__(
        self,
        *,
        site: Site,
        identity: Identity,
        program: Program,
        routes: Routes,
        leaves: Sequence[Any],
        batch_size: int,
        sizes: Sequence[int],
    ) -> None:
        self.outputs = JoinedOutputs(program.num_outputs, sizes, site.device)
        super().__init__(site=site, identity=identity, routes=routes, sizes=sizes, place=self.outputs.expect)
        self._is_cut = [is_batched(leaf, batch_size) for leaf in leaves]
        needed = {index for stage in routes.stages.values() for index in stage.inputs}
        self._inputs = {index: self._cut(leaves[index], batch_size) for index in needed}
        self._freed = False

    def _outputs_of(self, microbatch: int) -> JoinedOutputs:
        return self.outputs

    def _input(self, index: int, microbatch: int) -> Any:
        return self._inputs[index][microbatch]

    def forward(self, begin: Callable[[int], None] = lambda stage: None) -> None:
        """Run the forward table; the outputs of the whole batch are in `outputs` afterwards.

        Args:
            begin: Called with the stage before each action.
        """
        for action in self._routes.table.forward:
            begin(action.stage)
            self._forward(action)
        self._take_outputs(range(len(self._sizes)))
        self.outputs.check()
        self._exchange_late_outputs()
        self._site.link.flush()

    def _exchange_late_outputs(self) -> None:
        """Small outputs, one message each."""
        arrivals = {}
        for parcels in self._routes.incoming.values():
            for bundle, m in parcels:
                for number in bundle.outputs if m == 0 else ():
                    if self.outputs.is_late(number):
                        meta = self.outputs.late_meta(number)
                        at = wire.empty(meta, meta.dtype, self._site.device)
                        arrivals[number] = receive(self._site.link, bundle, meta, at)
        for bundles in self._routes.outgoing.values():
            for bundle in bundles:
                for number in filter(self.outputs.is_late, bundle.outputs):
                    self.outputs.set_whole(number, self.outputs.join(number))
                    block = wire.flat(self.outputs.join(number), self.outputs.late_meta(number))
                    self._site.link.send(block, bundle.destination, tag=bundle.stage)
        for number, arrival in arrivals.items():
            self.outputs.set_whole(number, take(arrival))

    @property
    def backward_actions(self) -> Sequence[Action]:
        """What `backward` runs on this rank."""
        return self._routes.table.backward

    def backward(
        self,
        gradients: Sequence[Tensor | None],
        *,
        keep: bool,
        parameters: bool = True,
        before_last: Callable[[], None] = lambda: None,
    ) -> None:
        """Run the backward table.

        Args:
            gradients: Of the whole-batch outputs; the same on every rank of the replica.
            keep: Keep the graphs for another backward pass.
            parameters: Accumulate into parameters. Otherwise only inputs get gradients.
            before_last: Called before the last action of this rank.

        Raises:
            PipelineError: If the graphs are gone.
        """
        if self._freed:
            raise PipelineError(
                f"Backward ran a second time through {self.identity.text}, whose activations are freed. Pass"
                f" `retain_graph=True` to the first backward if that is meant."
            )
        self._freed = not keep
        self._site.link.enter(self.identity)
        inbox = self._gradient_inbox()
        outbox = GradientOutbox(self._site.link, self._site.device, self._site.wire_dtype)
        cut = [None if gradient is None else self._split(gradient) for gradient in gradients]
        table = self._routes.table.backward
        for action in table:
            if action is table[-1]:
                before_last()
            own = [None if parts is None else parts[action.microbatch] for parts in cut]
            self._backward(action, own, inbox, outbox, keep=keep, parameters=parameters)
        if not table:
            before_last()
        self._site.link.flush()

    def input_gradient(self, index: int) -> Tensor | None:
        """The gradient of an input from this rank's stages; `None` if they don't read it, or no path leads from it."""
        parts = self._inputs.get(index, [])
        taken = [take_gradient(part) for part in parts]
        if all(gradient is None for gradient in taken):
            return None
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(parts, taken, strict=True)]
        if len(filled) == 1:
            return filled[0]
        return torch.cat(filled) if self._is_cut[index] else torch.stack(filled).sum(0)

    def _gradient_inbox(self) -> GradientInbox:
        gradients_from = {
            source: [parcel for parcel in parcels if self._sent_metas[parcel]]
            for source, parcels in self._routes.gradients_from.items()
        }
        inbox = GradientInbox(
            self._site.link,
            gradients_from,
            lambda bundle, m: list(self._sent_metas[bundle, m].values()),
            device=self._site.device,
            wire_dtype=self._site.wire_dtype,
        )
        inbox.expect_headers()
        return inbox

    def _cut(self, leaf: Any, batch_size: int) -> list[Any]:
        parts = split_leaf(leaf, batch_size, self._sizes)
        if self._has_graph and isinstance(leaf, Tensor) and leaf.requires_grad:
            return [leaf_of(part, True) for part in parts]
        return parts

    def _split(self, gradient: Tensor) -> Sequence[Tensor]:
        return (gradient,) if len(self._sizes) == 1 else torch.split(gradient, list(self._sizes))
