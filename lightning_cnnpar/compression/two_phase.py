"""Sums of what is encoded block by block: rank r sums part r of all ranks' vectors, and sends the sum around.

payload to rank r   │ header │ encoded part r │        header: a power of two, whether anything was not finite
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_cnnpar.compression import swap
from lightning_cnnpar.compression.base import BlockwiseCompressor, exponent_of
from lightning_cnnpar.compression.exchange import HEADER, Compressed, Part, Site


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
        self._row = HEADER + codec.payload_size(self._chunk)
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
                part.sub_(codec.decode(row[HEADER:], decoded))
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
            total.addcmul_(codec.decode(row[HEADER:], decoded), _power(row[0].view(torch.int8)))
        for owned in self._owned:
            if self._feedback and owned.residual is not None:
                total[owned.place].add_(owned.residual, alpha=site.scale)
        exponent = self._normalise(total, received[:, 1].ne(0).any())
        own = self._memory("own", self._row, torch.uint8)
        self._write(own, total, exponent)
        if self._feedback:
            total.sub_(codec.decode(own[HEADER:], decoded)).mul_(_power(exponent) / site.scale)
            for owned in self._owned:
                site.residuals.propose_server(owned.name, owned.start, total[owned.place])
        swap.all_gather(received, own, site.group)
        sums = self._memory("sums", site.size * chunk)
        for row, part_of_sum in zip(received, sums.view(site.size, chunk), strict=True):
            codec.decode(row[HEADER:], part_of_sum).mul_(_power(row[0].view(torch.int8)))
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
        row[2:HEADER] = 0
        row[HEADER:] = self._codec.encode(values)

    def _own_segments(self) -> Iterator[_Owned]:
        begin, end = self._site.rank * self._chunk, (self._site.rank + 1) * self._chunk
        for part, offset in zip(self._parts, self._offsets, strict=True):
            start, stop = max(begin, offset), min(end, offset + part.values.numel())
            if start < stop:
                residual = self._site.residuals.server(part.name, start - offset, stop - offset)
                yield _Owned(part.name, start - offset, slice(start - begin, stop - begin), residual)
            else:
                self._site.residuals.drop_server(part.name)


def _power(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones((), device=exponent.device), exponent)
