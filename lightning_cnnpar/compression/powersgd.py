"""Gradients as products of two thin matrices (Vogels et al., 2019, arXiv:1905.13727).

    M (rows x cols) of this rank     P = M Q ──all-reduce──► orthonormal P     Q = Mᵀ P ──all-reduce──► sum ≈ P Qᵀ

Q is kept for the next step: power iteration goes on from step to step.
"""

import dataclasses
import math
import zlib
from typing import ClassVar, final

import torch
from torch import Tensor

from lightning_cnnpar.compression.base import Compressor


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGD(Compressor):
    """The best product of two matrices with `rank` columns for each parameter.

    Args:
        rank: Columns, 1 to 4 for convolutional networks.
    """

    rank: int = 2

    name: ClassVar[str] = "powersgd"

    def __post_init__(self) -> None:
        """Refuse values that can't work."""
        super().__post_init__()
        self._at_least("rank", self.rank, 1)

    def pays(self, shape: tuple[int, ...]) -> bool:
        """Whether the two matrices are smaller than the gradient."""
        rows = shape[0]
        cols = math.prod(shape) // rows
        return self.rank * (rows + cols) < rows * cols


def first_factor(name: str, cols: int, rank: int, device: torch.device) -> Tensor:
    """Q (cols x rank) to start from: random, and the same on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(cols, rank, generator=generator).to(device)


def orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of the columns. Columns of zeros give some unit vectors, never NaN."""
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis
