"""Runs the action tables of one network call on one rank.

    F(s, m)   take the values that s receives ─► run s in the caller's context ─► send what it makes
    B(s, m)   take gradients of what s made ─► autograd through s ─► send gradients of what it received

Each stage of each microbatch is an autograd graph of its own: what it receives are leaves, what it makes are roots.
Parameters accumulate as usual. A graph is freed as soon as its backward has run.
"""

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_cnnpar.partition.stage import Stage
from lightning_cnnpar.pipeline import wire
from lightning_cnnpar.pipeline.exchange import Arrival, Inbox, Outbox, Place, Vocabulary, take
from lightning_cnnpar.pipeline.gradients import GradientInbox, GradientOutbox
from lightning_cnnpar.pipeline.outputs import JoinedOutputs
from lightning_cnnpar.pipeline.randomness import StageStreams
from lightning_cnnpar.pipeline.recompute import Recomputation
from lightning_cnnpar.pipeline.routes import Bundle, Routes
from lightning_cnnpar.pipeline.schedules import Action
from lightning_cnnpar.pipeline.transport import Identity, Link
from lightning_cnnpar.pipeline.wire import Meta


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """What all calls of a network on this rank share."""

    root: nn.Module
    link: Link
    vocabulary: Vocabulary
    streams: StageStreams
    device: torch.device
    wire_dtype: torch.dtype | None = None
    activation_checkpointing: str = "never"

    def recomputes(self, microbatch: int, num_microbatches: int) -> bool:
        """Whether a microbatch's activations are dropped and computed again."""
        if self.activation_checkpointing == "except_last":
            return microbatch < num_microbatches - 1
        return self.activation_checkpointing == "always"


class Executor(ABC):
    """Runs actions of one network call on this rank; how microbatches come and go is up to who uses it.

    Args:
        site: What calls share.
        identity: Which call this is.
        routes: Its routes on this rank.
        sizes: Samples in each microbatch.
        place: Where outputs of other ranks should arrive. Nothing here may refer to the executor itself: it is gone
            once the user's graph is.
        ahead: How many parcels may be received before they are asked for; `None` for any number.
    """

    def __init__(
        self,
        *,
        site: Site,
        identity: Identity,
        routes: Routes,
        sizes: Sequence[int],
        place: Place,
        ahead: int | None = None,
    ) -> None:
        self.identity = identity
        self._site, self._routes, self._sizes = site, routes, sizes
        self._has_graph = torch.is_grad_enabled()
        self._received: dict[tuple[str, int], Tensor] = {}
        self._made: dict[tuple[int, int], _Made] = {}
        self._sent_metas: dict[tuple[Bundle, int], Mapping[str, Meta]] = {}
        self._received_metas: dict[tuple[Bundle, int], Mapping[str, Meta]] = {}
        self._coming: dict[int, list[tuple[int, Arrival]]] = {}
        site.link.enter(identity)
        self._outbox = Outbox(site.link, site.vocabulary, sizes, site.wire_dtype)
        self._inbox = Inbox(
            site.link,
            site.vocabulary,
            sizes,
            routes.incoming,
            device=site.device,
            place=place,
            wire_dtype=site.wire_dtype,
            ahead=ahead,
        )

    @abstractmethod
    def _outputs_of(self, microbatch: int) -> JoinedOutputs:
        """Where the outputs of a microbatch are collected."""

    @abstractmethod
    def _input(self, index: int, microbatch: int) -> Any:
        """A leaf of the network's input, of one microbatch."""

    def _mode(self, action: Action) -> contextlib.AbstractContextManager[Any]:
        """What the forward of a stage runs in, also when it is computed again."""
        return contextlib.nullcontext()

    # --- forward

    def _forward(self, action: Action) -> None:
        stage, m = self._routes.stages[action.stage], action.microbatch
        inputs = [self._input(index, m) for index in stage.inputs]
        received = [self._value(name, m) for name in stage.receives]
        recomputation = self._recomputation(action)
        root, streams, mode = self._site.root, self._site.streams, self._mode(action)

        def run() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            with mode:
                return stage(root, inputs, received)

        with self._told_where(action):
            before = streams.state(stage.index)
            with streams.drawing(stage.index):
                if recomputation is None:
                    sent, outputs = run()
                else:
                    sent, outputs = recomputation.run(run, lambda: streams.replaying(before))
        self._send(stage, m, sent, outputs)
        for name, value in zip(stage.sends, sent, strict=True):
            if name in self._routes.local:
                self._received[name, m] = leaf_of(value, value.requires_grad)
        if self._has_graph:
            self._made[stage.index, m] = _Made.of(stage, sent, outputs, recomputation)
        else:
            for name in self._routes.read_last[stage.index]:
                del self._received[name, m]

    def _recomputation(self, action: Action) -> Recomputation | None:
        if not self._has_graph or not self._site.recomputes(action.microbatch, len(self._sizes)):
            return None
        return Recomputation(self._site.root, self._routes.stages[action.stage].modules, self._site.device)

    def _send(self, stage: Stage, m: int, sent: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        value_metas, output_metas = [wire.describe(value) for value in sent], [wire.describe(out) for out in outputs]
        now: list[Tensor | None] = []
        joined = self._outputs_of(m)
        for number, output, meta in zip(stage.outputs, outputs, output_metas, strict=True):
            joined.describe(number, meta)
            joined.add(number, output)
            now.append(None if joined.is_late(number) else output)
        for bundle in self._routes.outgoing[stage.index]:
            metas = [value_metas[position] for position in bundle.positions]
            values = [sent[position] for position in bundle.positions]
            self._outbox.send(bundle, m, [*values, *now], (*metas, *output_metas))
            self._sent_metas[bundle, m] = _differentiable(bundle, metas)

    def _value(self, name: str, m: int) -> Tensor:
        if (name, m) not in self._received:
            self._receive(self._routes.received_in[name], m)
        return self._received[name, m]

    def _receive(self, bundle: Bundle, m: int) -> None:
        """Wait for the values of a parcel; its outputs have time until they are asked for."""
        values, outputs = self._inbox.arrivals(bundle, m)
        self._received_metas[bundle, m] = _differentiable(bundle, [arrival.meta for arrival in values])
        for name, arrival in zip(bundle.values, values, strict=True):
            self._received[name, m] = leaf_of(take(arrival), self._has_graph and arrival.meta.requires_grad)
        self._coming.setdefault(m, []).extend(outputs.items())

    def _take_outputs(self, microbatches: Sequence[int]) -> None:
        """Wait for the outputs of other ranks."""
        wanted = set(microbatches)
        for parcels in self._routes.incoming.values():
            for bundle, m in parcels:
                if bundle.outputs and not bundle.values and m in wanted:
                    self._receive(bundle, m)
        for m in microbatches:
            joined = self._outputs_of(m)
            for number, arrival in self._coming.pop(m, ()):
                joined.add(number, take(arrival))

    # --- backward

    def _backward(
        self,
        action: Action,
        gradients: Sequence[Tensor | None],
        inbox: GradientInbox,
        outbox: GradientOutbox,
        *,
        keep: bool,
        parameters: bool,
    ) -> None:
        """Run one backward action.

        Args:
            action: Which.
            gradients: Of the microbatch's outputs.
            inbox: Where gradients of values come from.
            outbox: Where they go to.
            keep: Keep the graph for another backward pass.
            parameters: Accumulate into parameters. Otherwise only inputs get gradients.
        """
        made = self._made[action.stage, action.microbatch]
        if not keep:
            del self._made[action.stage, action.microbatch]
        if made.recomputation is not None:
            # First: it needs no gradient, and fills the time until there is one.
            with self._told_where(action):
                made.recomputation.restore()
        roots: list[GradientEdge] = []
        weights: list[Tensor] = []
        for value, gradient in self._gradients_of(action, made, gradients, inbox):
            roots.append(value)
            weights.append(gradient)
        if roots:
            with self._told_where(action):
                if parameters:
                    torch.autograd.backward(roots, weights, retain_graph=keep)
                elif leaves := self._leaves_of(action):
                    torch.autograd.backward(roots, weights, retain_graph=keep, inputs=leaves)
        if made.recomputation is not None:
            made.recomputation.drop()
        del made
        self._return_gradients(action, outbox, keep=keep)

    def _gradients_of(
        self, action: Action, made: "_Made", gradients: Sequence[Tensor | None], inbox: GradientInbox
    ) -> Iterator[tuple[GradientEdge, Tensor]]:
        """What the stage made, with the sum of the gradients from all that read it. Without gradient: left out."""
        m = action.microbatch
        totals: dict[str, Tensor] = {}
        for bundle in self._routes.outgoing[action.stage]:
            names = self._sent_metas[bundle, m]
            for name, gradient in zip(names, inbox.gradients(bundle, m) if names else (), strict=True):
                if gradient is not None:
                    totals[name] = totals[name] + gradient if name in totals else gradient
        for name, value in made.values.items():
            total = totals.get(name)
            own = take_gradient(self._received[name, m]) if name in self._routes.local else None
            if own is not None:
                total = own if total is None else total + own
            if total is not None:
                yield value, total
        for number, output in made.outputs.items():
            whole = gradients[number]
            if whole is not None:
                yield output, whole

    def _return_gradients(self, action: Action, outbox: GradientOutbox, *, keep: bool) -> None:
        for bundle, m in self._routes.gradients_after[action]:
            metas = self._received_metas[bundle, m]
            if metas:
                leaves = [self._received[name, m] for name in metas]
                outbox.send(bundle, m, list(metas.values()), [take_gradient(leaf) for leaf in leaves])
            if not keep:
                for name in bundle.values:
                    del self._received[name, m]
        if not keep:
            # Those that stayed on this rank have been read, and their gradients passed on, when their maker is done.
            for name in self._routes.local.intersection(self._routes.stages[action.stage].sends):
                del self._received[name, action.microbatch]

    def _leaves_of(self, action: Action) -> list[Tensor]:
        stage, m = self._routes.stages[action.stage], action.microbatch
        leaves = [*(self._input(index, m) for index in stage.inputs), *(self._received[n, m] for n in stage.receives)]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]

    @contextlib.contextmanager
    def _told_where(self, action: Action) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            kind = "forward" if action.kind == "F" else "backward"
            error.add_note(
                f"Raised in the {kind} of stage {action.stage} on rank {self._routes.rank} of the replica, microbatch"
                f" {action.microbatch} of {len(self._sizes)}, {self.identity.text}."
            )
            raise


@dataclasses.dataclass(frozen=True)
class _Made:
    """What a stage made of one microbatch and a loss can depend on: roots of its autograd graph, without their values.

    Values live on only where autograd needs them.
    """

    values: Mapping[str, GradientEdge]
    outputs: Mapping[int, GradientEdge]
    recomputation: Recomputation | None

    @classmethod
    def of(
        cls,
        stage: Stage,
        sent: Sequence[Tensor],
        outputs: Sequence[Tensor],
        recomputation: Recomputation | None,
    ) -> "_Made":
        return cls(
            {name: get_gradient_edge(v) for name, v in zip(stage.sends, sent, strict=True) if v.requires_grad},
            {number: get_gradient_edge(v) for number, v in zip(stage.outputs, outputs, strict=True) if v.requires_grad},
            recomputation,
        )


def leaf_of(tensor: Tensor, requires_grad: bool) -> Tensor:
    """The same values at the start of a graph of their own."""
    return tensor.detach().requires_grad_() if requires_grad else tensor.detach()


def take_gradient(leaf: Any) -> Tensor | None:
    """The gradient that a leaf has got, which is taken off it."""
    gradient: Tensor | None = leaf.grad
    leaf.grad = None
    return gradient


def _differentiable(bundle: Bundle, metas: Sequence[Meta]) -> dict[str, Meta]:
    return {name: meta for name, meta in zip(bundle.values, metas, strict=True) if meta.requires_grad}
