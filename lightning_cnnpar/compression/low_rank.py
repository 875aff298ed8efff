"""Sums of products of two thin matrices: both are summed over the ranks, one after the other."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_cnnpar.compression import swap
from lightning_cnnpar.compression.exchange import Compressed, Part, Site
from lightning_cnnpar.compression.powersgd import PowerSGD, first_factor, orthonormal


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
        swap.all_reduce(self._products, site.group)
        fault = ~torch.isfinite(self._products).all()
        torch.nan_to_num(self._products, nan=0.0, posinf=0.0, neginf=0.0, out=self._products)
        bases = [orthonormal(product) for product in self._left()]
        factors = self._memory("factors", rank * sum(self._cols))
        right = [piece.view(-1, rank) for piece in torch.split(factors, [rank * col for col in self._cols])]
        for matrix, basis, factor in zip(self._matrices(), bases, right, strict=True):
            torch.mm(matrix.t(), basis, out=factor)
        swap.all_reduce(factors, site.group)
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
