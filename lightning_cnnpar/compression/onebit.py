"""One bit for each gradient: its sign, with the root mean square of the block (Tang et al., 2021, arXiv:2102.02888).

The mean magnitude would be nearer to a block of normal values, but residuals have heavy tails, and those it delivers
too slowly: with a constant gradient four times as much stays outstanding.

block    + - - + + - + -   root mean square    value = + or - that
         one byte          float32
"""

import dataclasses
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from lightning_cnnpar.compression.base import BlockwiseCompressor

_SCALE = 4


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class OneBit(BlockwiseCompressor):
    """A thirtieth of the bytes: signs. Useful with error feedback only."""

    block: int = 1024

    name: ClassVar[str] = "onebit"

    def payload_size(self, numel: int) -> int:
        """A bit for each element, four bytes for each block."""
        return numel // 8 + numel // self.block * _SCALE

    def encode(self, values: Tensor) -> Tensor:
        """See `BlockwiseCompressor.encode`."""
        rows = values.view(-1, self.block)
        scales = torch.linalg.vector_norm(rows, dim=1).div_(self.block**0.5)
        return torch.cat([_pack(values >= 0), scales.view(torch.uint8)])

    def decode(self, payload: Tensor, out: Tensor) -> Tensor:
        """See `BlockwiseCompressor.decode`."""
        count = out.numel() // 8
        scales = payload[count:].clone().view(torch.float32)
        rows = out.view(-1, self.block)
        out.copy_(_unpack(payload[:count])).mul_(2).sub_(1)
        rows.mul_(scales.unsqueeze(1))
        return out


def _pack(bits: Tensor) -> Tensor:
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))
    places = bits.view(-1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8, device=bits.device)
    return places.sum(1, dtype=torch.uint8)


def _unpack(packed: Tensor) -> Tensor:
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), bitorder="little"))
    places = packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (places & 1).view(-1)
