"""Sums of the largest gradients: every rank gets the pairs of all ranks, and adds them up in the same order.

payload   │ header │ indices of all parameters, int32 │ values, bfloat16 │
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_cnnpar.compression import swap
from lightning_cnnpar.compression.exchange import HEADER, Compressed, Part, Site
from lightning_cnnpar.compression.topk import INDEX_BYTES, VALUE_BYTES, TopK, largest


class Sparse(Compressed):
    """The largest of each parameter."""

    def __init__(self, site: Site, key: Any, parts: Sequence[Part], codec: TopK) -> None:
        sizes = [part.values.numel() for part in parts]
        super().__init__(site, key, parts, codec, sizes)
        self._counts = [codec.count(size) for size in sizes]
        self._index_bytes = INDEX_BYTES * sum(self._counts)
        self.payload_bytes = HEADER + (INDEX_BYTES + VALUE_BYTES) * sum(self._counts)
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
            self._clear_velocity(part, found - offset)
            # What is missing to the count is sent as zeros.
            indices[stop : begin + count] = offset
            begin += count
        self._payload = self._memory("payload", self.payload_bytes, torch.uint8)
        self._payload[:HEADER] = 0
        self._payload[1] = fault
        self._payload[HEADER : HEADER + self._index_bytes] = indices.int().view(torch.uint8)
        self._payload[HEADER + self._index_bytes :] = chosen.view(torch.uint8)
        self._propose(values)

    def _clear_velocity(self, part: Part, sent: Tensor) -> None:
        """Where a velocity was sent it starts anew: else it would push on for long after (momentum factor masking)."""
        if self._site.momentum:
            self._velocity(part)[sent] = 0.0

    def send(self) -> None:
        """See `Exchange`."""
        site = self._site
        rows = self._memory("received", site.size * self.payload_bytes, torch.uint8).view(site.size, -1)
        swap.all_gather(rows, self._payload, site.group)
        sums = self._memory("sums", self._numel).zero_()
        for row in rows:
            indices = row[HEADER : HEADER + self._index_bytes].clone().view(torch.int32)
            values = row[HEADER + self._index_bytes :].clone().view(torch.bfloat16)
            sums.index_add_(0, indices, values.float())
        self._hand_out(sums, rows[:, 1].ne(0).any())
