"""How gradients of one bucket are summed over replicas: encoded on the encoder's thread, sent on the sender's.

    blockwise    encode N parts ─► all-to-all ─► decode, sum, encode ─► all-gather ─► decode
    sparse       choose ─► all-gather ─► add up
    low-rank     M Q ─► all-reduce ─► orthonormal P ─► Mᵀ P ─► all-reduce ─► P Qᵀ
    dense        all-reduce

Every rank decodes the same bytes (its own as well), so all end with the same bits.
"""

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cnnpar.compression import swap
from lightning_cnnpar.compression.base import BlockwiseCompressor, Compressor, exponent_of
from lightning_cnnpar.compression.powersgd import PowerSGD, first_factor, orthonormal
from lightning_cnnpar.compression.residual import Residuals
from lightning_cnnpar.compression.topk import INDEX_BYTES, VALUE_BYTES, TopK, largest

# Of a payload: a power of two, and whether anything was not finite. Eight bytes, so that what follows is aligned.
_HEADER = 8


@dataclasses.dataclass(frozen=True)
class Part:
    """One parameter's gradient.

    Attributes:
        name: Of the parameter.
        values: One dimension, in the parameter's memory order; becomes the sum over the group.
        shape: Of the parameter.
    """

    name: str
    values: Tensor
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the values as they are."""
        return self.values.numel() * self.values.element_size()


@dataclasses.dataclass(kw_only=True)
class Site:
    """What the exchanges of one rank share.

    Attributes:
        group: The ranks to sum over; used by one thread only.
        rank: Of this rank in it.
        size: N.
        residuals: Of this rank.
        scale: The loss scale of the present step: residuals are kept without it.
        faults: For each exchange of the step whether something was not finite, on some rank.
        buffers: Memory that is kept between steps.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    residuals: Residuals
    scale: float = 1.0
    faults: list[Tensor] = dataclasses.field(default_factory=list)
    buffers: dict[Any, Tensor] = dataclasses.field(default_factory=dict)

    def buffer(self, key: Any, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of that size, with anything in it: on a CPU, new memory costs more than most passes over it."""
        found = self.buffers.get(key)
        if found is None or found.numel() != numel or found.dtype != dtype:
            found = self.buffers[key] = torch.empty(numel, dtype=dtype, device=device)
        return found


class Exchange(ABC):
    """The exchange of some parts of a bucket.

    Attributes:
        payload_bytes: What this rank gives to collectives.
        wire_bytes: What it sends, by the formula of the collective.
    """

    payload_bytes: int
    wire_bytes: float

    def __init__(self, site: Site, key: Any, parts: Sequence[Part]) -> None:
        self._site, self._key, self._parts = site, key, parts
        self._device = parts[0].values.device

    @abstractmethod
    def encode(self) -> None:
        """All that needs no other rank."""

    @abstractmethod
    def send(self) -> None:
        """The collectives; afterwards the parts hold the sum."""


class Dense(Exchange):
    """As they are."""

    def __init__(self, site: Site, key: Any, parts: Sequence[Part]) -> None:
        super().__init__(site, key, parts)
        self.payload_bytes = sum(part.num_bytes for part in parts)
        self.wire_bytes = swap.ring_bytes(site.size, self.payload_bytes)

    def encode(self) -> None:
        """See `Exchange`."""
        self._joined = torch.cat([part.values for part in self._parts])

    def send(self) -> None:
        """See `Exchange`."""
        dist.all_reduce(self._joined, group=self._site.group)
        self._site.faults.append(~torch.isfinite(self._joined).all())
        sums = torch.split(self._joined, [part.values.numel() for part in self._parts])
        for part, values in zip(self._parts, sums, strict=True):
            part.values.copy_(values)


class Compressed(Exchange, ABC):
    """Gradients and residuals side by side in one float32 vector.

    Args:
        site: Of this rank.
        key: Under which its memory is kept.
        parts: What is exchanged.
        compressor: Whose options hold.
        sizes: Places that each part takes in the vector; its values come first.
    """

    def __init__(
        self, site: Site, key: Any, parts: Sequence[Part], compressor: Compressor, sizes: Sequence[int]
    ) -> None:
        super().__init__(site, key, parts)
        self._feedback = compressor.error_feedback
        *self._offsets, self._numel = itertools.accumulate(sizes, initial=0)

    def _memory(self, role: str, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._site.buffer((self._key, role), numel, dtype, self._device)

    def _segments(self, vector: Tensor) -> Iterator[tuple[Part, Tensor]]:
        """Each part and its values in a vector."""
        for part, offset in zip(self._parts, self._offsets, strict=True):
            yield part, vector[offset : offset + part.values.numel()]

    def _fill(self, values: Tensor) -> None:
        """Gradients plus residuals."""
        for part, segment in self._segments(values):
            segment.copy_(part.values)
            residual = self._site.residuals.worker.get(part.name)
            if self._feedback and residual is not None:
                segment.add_(residual, alpha=self._site.scale)

    def _propose(self, left: Tensor) -> None:
        if not self._feedback:
            return
        left.mul_(1.0 / self._site.scale)
        for part, segment in self._segments(left):
            self._site.residuals.propose_worker(part.name, segment)

    def _hand_out(self, sums: Tensor, fault: Tensor) -> None:
        """Write the sums into the parts: NaN where some rank's gradients were not finite, as plain sums would be."""
        self._site.faults.append(fault)
        sums.add_(torch.where(fault, torch.nan, 0.0))
        for part, segment in self._segments(sums):
            part.values.copy_(segment)


@dataclasses.dataclass(frozen=True)
class _Owned:
    """Where this rank's chunk meets a parameter.

    Attributes:
        name: Of the parameter.
        start: First element, in the parameter.
        place: In the chunk.
        residual: The server's, if there is one.
    """

    name: str
    start: int
    place: slice
    residual: Tensor | None


class Blockwise(Compressed):
    """Two encoded phases. A parameter starts at a block of its own, so scales don't mix parameters."""

    def __init__(self, site: Site, key: Any, parts: Sequence[Part], codec: BlockwiseCompressor) -> None:
        super().__init__(site, key, parts, codec, [codec.align(part.values.numel()) for part in parts])
        self._codec = codec
        self._chunk = codec.align(-(-self._numel // site.size))
        self._row = _HEADER + codec.payload_size(self._chunk)
        self.payload_bytes = site.size * self._row + self._row
        self.wire_bytes = 2 * (site.size - 1) * self._row

    def encode(self) -> None:
        """See `Exchange`."""
        site, codec, chunk = self._site, self._codec, self._chunk
        # What was another rank's to sum so far goes into the residuals before these are read.
        self._owned = list(self._own_segments())
        values = self._memory("values", site.size * chunk)
        self._fill(values)
        self._pad(values)
        exponent = self._normalise(values)
        self._payload = self._memory("payload", site.size * self._row, torch.uint8).view(site.size, -1)
        decoded = self._memory("decoded", chunk)
        for row, part in zip(self._payload, values.view(site.size, chunk), strict=True):
            self._write(row, part, exponent)
            if self._feedback:
                part.sub_(codec.decode(row[_HEADER:], decoded))
        values.mul_(_power(exponent))
        self._propose(values)

    def send(self) -> None:
        """See `Exchange`."""
        site, codec, chunk = self._site, self._codec, self._chunk
        received = self._memory("received", site.size * self._row, torch.uint8).view(site.size, -1)
        swap.all_to_all(received, self._payload, site.group)
        total = self._memory("total", chunk).zero_()
        decoded = self._memory("decoded again", chunk)
        for row in received:
            total.addcmul_(codec.decode(row[_HEADER:], decoded), _power(row[0].view(torch.int8)))
        for owned in self._owned:
            if self._feedback and owned.residual is not None:
                total[owned.place].add_(owned.residual, alpha=site.scale)
        exponent = self._normalise(total, received[:, 1].ne(0).any())
        own = self._memory("own", self._row, torch.uint8)
        self._write(own, total, exponent)
        if self._feedback:
            total.sub_(codec.decode(own[_HEADER:], decoded)).mul_(_power(exponent) / site.scale)
            for owned in self._owned:
                site.residuals.propose_server(owned.name, owned.start, total[owned.place])
        swap.all_gather(received, own, site.group)
        sums = self._memory("sums", site.size * chunk)
        for row, part_of_sum in zip(received, sums.view(site.size, chunk), strict=True):
            codec.decode(row[_HEADER:], part_of_sum).mul_(_power(row[0].view(torch.int8)))
        self._hand_out(sums, received[:, 1].ne(0).any())

    def _pad(self, values: Tensor) -> None:
        """Fill each parameter's last block with more of its values: zeros would lower the scale of those few in it."""
        ends = [*self._offsets[1:], values.numel()]
        for part, offset, end in zip(self._parts, self._offsets, ends, strict=True):
            last = offset + part.values.numel()
            while last < end:
                more = min(end - last, last - offset)
                values[last : last + more] = values[offset : offset + more]
                last += more

    def _normalise(self, values: Tensor, fault: Tensor | None = None) -> Tensor:
        """Bring values near 1, in place; notes whether they are finite."""
        exponent, finite = exponent_of(values)
        self._fault = ~finite if fault is None else ~finite | fault
        values.mul_(_power(-exponent))
        if values.device.type != "cpu" or self._fault:
            torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0, out=values)
        return exponent

    def _write(self, row: Tensor, values: Tensor, exponent: Tensor) -> None:
        row[0] = exponent.view(torch.uint8)
        row[1] = self._fault
        row[2:_HEADER] = 0
        row[_HEADER:] = self._codec.encode(values)

    def _own_segments(self) -> Iterator[_Owned]:
        begin, end = self._site.rank * self._chunk, (self._site.rank + 1) * self._chunk
        for part, offset in zip(self._parts, self._offsets, strict=True):
            start, stop = max(begin, offset), min(end, offset + part.values.numel())
            if start < stop:
                residual = self._site.residuals.server(part.name, start - offset, stop - offset)
                yield _Owned(part.name, start - offset, slice(start - begin, stop - begin), residual)
            else:
                self._site.residuals.drop_server(part.name)


class Sparse(Compressed):
    """The largest of each parameter."""

    def __init__(self, site: Site, key: Any, parts: Sequence[Part], codec: TopK) -> None:
        sizes = [part.values.numel() for part in parts]
        super().__init__(site, key, parts, codec, sizes)
        self._counts = [codec.count(size) for size in sizes]
        self._index_bytes = INDEX_BYTES * sum(self._counts)
        self.payload_bytes = _HEADER + (INDEX_BYTES + VALUE_BYTES) * sum(self._counts)
        self.wire_bytes = (site.size - 1) * self.payload_bytes

    def encode(self) -> None:
        """See `Exchange`."""
        for part in self._parts:
            self._site.residuals.fold(part.name)
        values = self._memory("values", self._numel)
        self._fill(values)
        fault = ~torch.isfinite(values).all()
        indices = torch.zeros(sum(self._counts), dtype=torch.int64, device=self._device)
        chosen = torch.zeros(sum(self._counts), dtype=torch.bfloat16, device=self._device)
        begin = 0
        for part, offset, count in zip(self._parts, self._offsets, self._counts, strict=True):
            found = largest(values[offset : offset + part.values.numel()], count) + offset
            stop = begin + found.numel()
            indices[begin:stop] = found
            chosen[begin:stop] = values[found].bfloat16()
            values[found] -= chosen[begin:stop].float()
            # What is missing to the count is sent as zeros.
            indices[stop : begin + count] = offset
            begin += count
        self._payload = self._memory("payload", self.payload_bytes, torch.uint8)
        self._payload[:_HEADER] = 0
        self._payload[1] = fault
        self._payload[_HEADER : _HEADER + self._index_bytes] = indices.int().view(torch.uint8)
        self._payload[_HEADER + self._index_bytes :] = chosen.view(torch.uint8)
        self._propose(values)

    def send(self) -> None:
        """See `Exchange`."""
        site = self._site
        rows = self._memory("received", site.size * self.payload_bytes, torch.uint8).view(site.size, -1)
        swap.all_gather(rows, self._payload, site.group)
        sums = self._memory("sums", self._numel).zero_()
        for row in rows:
            indices = row[_HEADER : _HEADER + self._index_bytes].clone().view(torch.int32)
            values = row[_HEADER + self._index_bytes :].clone().view(torch.bfloat16)
            sums.index_add_(0, indices, values.float())
        self._hand_out(sums, rows[:, 1].ne(0).any())


class LowRank(Compressed):
    """Products of two thin matrices."""

    def __init__(self, site: Site, key: Any, parts: Sequence[Part], codec: PowerSGD) -> None:
        sizes = [part.values.numel() for part in parts]
        super().__init__(site, key, parts, codec, sizes)
        self._rank = codec.rank
        rows = [part.shape[0] for part in parts]
        cols = [size // row for size, row in zip(sizes, rows, strict=True)]
        self._rows, self._cols = rows, cols
        self.payload_bytes = 4 * codec.rank * (sum(rows) + sum(cols))
        self.wire_bytes = swap.ring_bytes(site.size, self.payload_bytes)

    def encode(self) -> None:
        """See `Exchange`."""
        rank = self._rank
        for part in self._parts:
            self._site.residuals.fold(part.name)
        self._values = self._memory("values", self._numel)
        self._fill(self._values)
        self._products = self._memory("products", rank * sum(self._rows))
        for matrix, part, product in zip(self._matrices(), self._parts, self._left(), strict=True):
            factor = self._site.residuals.factors.get(part.name)
            if factor is None or factor.shape[1] != rank:
                factor = first_factor(part.name, matrix.shape[1], rank, self._device)
            torch.mm(matrix, factor, out=product)

    def send(self) -> None:
        """See `Exchange`."""
        site, rank = self._site, self._rank
        dist.all_reduce(self._products, group=site.group)
        fault = ~torch.isfinite(self._products).all()
        torch.nan_to_num(self._products, nan=0.0, posinf=0.0, neginf=0.0, out=self._products)
        bases = [orthonormal(product) for product in self._left()]
        factors = self._memory("factors", rank * sum(self._cols))
        right = [piece.view(-1, rank) for piece in torch.split(factors, [rank * col for col in self._cols])]
        for matrix, basis, factor in zip(self._matrices(), bases, right, strict=True):
            torch.mm(matrix.t(), basis, out=factor)
        dist.all_reduce(factors, group=site.group)
        sums = self._memory("sums", self._numel)
        for (part, segment), basis, factor in zip(self._segments(sums), bases, right, strict=True):
            torch.mm(basis, factor.t(), out=segment.view(len(basis), -1))
            site.residuals.propose_factor(part.name, factor.clone())
        self._values.add_(sums, alpha=-1.0 / site.size)
        self._propose(self._values)
        self._hand_out(sums, fault)

    def _matrices(self) -> list[Tensor]:
        return [
            segment.view(row, -1) for (_, segment), row in zip(self._segments(self._values), self._rows, strict=True)
        ]

    def _left(self) -> list[Tensor]:
        rank = self._rank
        return [piece.view(-1, rank) for piece in torch.split(self._products, [rank * row for row in self._rows])]


def _power(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones((), device=exponent.device), exponent)
