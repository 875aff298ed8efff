"""Bundles of activations on their way between ranks, on top of the messages of `transport`.

A header goes ahead of the microbatches of a bundle. It carries the number of a description (shapes, types, layouts)
that the receiver knows, or a new number with the description; so descriptions travel only when they change.
Microbatches of one size are described alike, and with their header at hand a receiver posts all of them at once:

    sender, batch of 8 in 3      header  [3 samples]  [3 samples]  header  [2 samples]
    receiver                     wait, post 2 receives             wait, post 1
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_cnnpar.pipeline import wire
from lightning_cnnpar.pipeline.errors import PipelineError
from lightning_cnnpar.pipeline.routes import Bundle, Parcel
from lightning_cnnpar.pipeline.transport import Header, Link, Receipt
from lightning_cnnpar.pipeline.wire import Meta

Metas = tuple[Meta, ...]
Key = tuple[int, int]
"""Stage and microbatch: what a parcel is called between two ranks."""

# Descriptions that a pair of ranks remembers; more than image sizes and layouts a training run could alternate between.
_REMEMBERED = 4096


class Vocabulary:
    """The descriptions that this rank has told each other rank and that they have told it, by number."""

    def __init__(self) -> None:
        self._told: dict[int, dict[Metas, int]] = {}
        self._heard: dict[int, dict[int, Metas]] = {}

    def tell(self, peer: int, metas: Metas) -> Header:
        """The header that makes `metas` known to a rank."""
        told = self._told.setdefault(peer, {})
        if metas in told:
            return Header(told[metas])
        if len(told) == _REMEMBERED:
            told.clear()
        told[metas] = len(told)
        return Header(told[metas], metas)

    def hear(self, peer: int, header: Header) -> Metas:
        """What a header from a rank describes."""
        heard = self._heard.setdefault(peer, {})
        if header.body is not None:
            heard[header.number] = header.body
        return heard[header.number]


def begins_run(sizes: Sequence[int], microbatch: int) -> bool:
    """Whether a microbatch may be described otherwise than the one before it, so that a header goes ahead."""
    return microbatch == 0 or sizes[microbatch] != sizes[microbatch - 1]


@dataclasses.dataclass(kw_only=True)
class Arrival:
    """A tensor on its way to this rank."""

    meta: Meta
    tensor: Tensor
    receipt: Receipt


class Outbox:
    """Sends the bundles of one call.

    Args:
        link: Connections to the other ranks.
        vocabulary: What they know.
        sizes: Samples in each microbatch.
        wire_dtype: Narrower type for floating-point values between stages. Outputs are never narrowed: the rank that
            makes them would go on with other numbers than the rest.
    """

    def __init__(
        self, link: Link, vocabulary: Vocabulary, sizes: Sequence[int], wire_dtype: torch.dtype | None = None
    ) -> None:
        self._link, self._vocabulary, self._sizes, self._wire_dtype = link, vocabulary, sizes, wire_dtype
        self._last: dict[tuple[int, int], Metas] = {}

    def send(self, bundle: Bundle, microbatch: int, tensors: Sequence[Tensor | None], metas: Metas) -> None:
        """Send a microbatch of a bundle: its values, then its outputs.

        Args:
            bundle: What is sent.
            microbatch: Which one.
            tensors: `None` for an output that is sent later, joined.
            metas: Descriptions of all of them.

        Raises:
            PipelineError: If shapes depend on more than the size of a microbatch, for instance on the data.
        """
        pair = (bundle.stage, bundle.destination)
        if begins_run(self._sizes, microbatch):
            header = self._vocabulary.tell(bundle.destination, metas)
            self._link.send_header(header, bundle.destination, tag=bundle.stage)
        elif metas != self._last[pair]:
            raise _varying(bundle, microbatch, self._last[pair], metas)
        self._last[pair] = metas
        for position, (tensor, meta) in enumerate(zip(tensors, metas, strict=True)):
            if tensor is not None:
                dtype = wire_type(meta, self._wire_dtype) if position < len(bundle.values) else meta.dtype
                key = ("F", bundle.stage, bundle.destination, microbatch)
                self._link.send(wire.flat(tensor, meta, dtype), bundle.destination, tag=bundle.stage, key=key)


Place = Callable[[int, int, Meta], tuple[Tensor, Tensor] | None]
"""Where an output (its number, microbatch, description) should arrive; `None` if it comes later, joined."""


class Inbox:
    """Receives the bundles of one call.

    Args:
        link: Connections to the other ranks.
        vocabulary: What they have told.
        sizes: Samples in each microbatch.
        incoming: For each other rank the parcels that it sends, in order.
        device: Where stages compute.
        place: Where outputs should arrive.
        wire_dtype: As the senders have it.
        ahead: How many parcels may be received before they are asked for, which takes their memory; `None`: any number.
    """

    def __init__(
        self,
        link: Link,
        vocabulary: Vocabulary,
        sizes: Sequence[int],
        incoming: Mapping[int, Sequence[Parcel]],
        *,
        device: torch.device,
        place: Place,
        wire_dtype: torch.dtype | None = None,
        ahead: int | None = None,
    ) -> None:
        self._link, self._vocabulary, self._sizes = link, vocabulary, sizes
        self._device, self._place, self._wire_dtype = device, place, wire_dtype
        self._ahead = ahead
        self._queues = {source: deque(parcels) for source, parcels in incoming.items()}
        self._source_of = {bundle.stage: source for source, parcels in incoming.items() for bundle, _ in parcels}
        self._described: dict[int, Metas] = {}
        self._headers: dict[Key, Callable[[], Header]] = {}
        self._arrivals: dict[Key, tuple[list[Arrival], dict[int, Arrival]]] = {}
        for source, parcels in incoming.items():
            for bundle, microbatch in parcels:
                if begins_run(sizes, microbatch):
                    self._headers[bundle.stage, microbatch] = link.expect_header(source, tag=bundle.stage)

    def arrivals(self, bundle: Bundle, microbatch: int) -> tuple[list[Arrival], dict[int, Arrival]]:
        """What is on its way as this parcel: the values of the bundle, and outputs by number."""
        key = (bundle.stage, microbatch)
        while key not in self._arrivals:
            self._post_run(bundle.source)
        arrivals = self._arrivals.pop(key)
        if self._ahead is not None:
            self._post_ahead(bundle.source)
        return arrivals

    def _post_run(self, source: int) -> None:
        """Post receives up to the next one whose description isn't here yet, or one if they come when asked for."""
        first = True
        while self._queues[source] and (first or (self._ahead is None and self._is_described(source))):
            first = False
            self._post_next(source)

    def _post_ahead(self, source: int) -> None:
        """While one is worked on, the next ones may come in."""
        assert self._ahead is not None
        waiting = sum(1 for stage, m in self._arrivals if self._source_of[stage] == source)
        while self._queues[source] and waiting < self._ahead and self._is_described(source):
            self._post_next(source)
            waiting += 1

    def _is_described(self, source: int) -> bool:
        bundle, microbatch = self._queues[source][0]
        return (bundle.stage, microbatch) not in self._headers

    def _post_next(self, source: int) -> None:
        queue = self._queues[source]
        bundle, microbatch = queue.popleft()
        header = self._headers.pop((bundle.stage, microbatch), None)
        if header is not None:
            self._described[bundle.stage] = self._vocabulary.hear(source, header())
        self._arrivals[bundle.stage, microbatch] = self._post(bundle, microbatch, self._described[bundle.stage])

    def _post(self, bundle: Bundle, microbatch: int, metas: Metas) -> tuple[list[Arrival], dict[int, Arrival]]:
        count = len(bundle.values)
        values = [
            receive(self._link, bundle, meta, wire.empty(meta, wire_type(meta, self._wire_dtype), self._device))
            for meta in metas[:count]
        ]
        placed = {
            n: (meta, self._place(n, microbatch, meta)) for n, meta in zip(bundle.outputs, metas[count:], strict=True)
        }
        outputs = {n: receive(self._link, bundle, meta, at) for n, (meta, at) in placed.items() if at is not None}
        return values, outputs


def receive(link: Link, bundle: Bundle, meta: Meta, at: tuple[Tensor, Tensor]) -> Arrival:
    """Be ready for a tensor of a bundle, at a tensor and its flat block."""
    tensor, block = at
    return Arrival(meta=meta, tensor=tensor, receipt=link.receive(block, bundle.source, tag=bundle.stage))


def take(arrival: Arrival) -> Tensor:
    """The tensor, once it is here, in its own type."""
    arrival.receipt.wait()
    meta = arrival.meta
    return arrival.tensor if arrival.tensor.dtype == meta.dtype else arrival.tensor.to(meta.dtype)


def wire_type(meta: Meta, wire_dtype: torch.dtype | None) -> torch.dtype:
    """The type in which a value travels between stages."""
    if wire_dtype is None or not meta.dtype.is_floating_point or wire_dtype.itemsize >= meta.dtype.itemsize:
        return meta.dtype
    return wire_dtype


def _varying(bundle: Bundle, microbatch: int, before: Metas, now: Metas) -> PipelineError:
    names = (*bundle.values, *(f"output {number}" for number in bundle.outputs))
    name, old, new = next((n, a, b) for n, a, b in zip(names, before, now, strict=True) if a != b)
    return PipelineError(
        f"The value {name!r} that stage {bundle.stage} sends to rank {bundle.destination} is {new} in microbatch"
        f" {microbatch}, but {old} in the one before, which has as many samples. Shapes that depend on the data can't"
        f" be cut into microbatches: set `num_microbatches=1`."
    )
