"""Numbers of 16, 8, 4 and 2 bits, with a scale for each block.

    block of int4    [ q0 q1 | q2 q3 | ... ]  scale, smallest       value = q * scale + smallest
                       one byte   one byte      as the packed rows of torch's quantised embeddings

On the CPU the packing is that of FBGEMM's row-wise kernels, which torch offers for quantised embeddings; elsewhere
plain tensor operations give the same bytes.
"""

import dataclasses
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from lightning_cnnpar.compression.base import BlockwiseCompressor


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class BFloat16(BlockwiseCompressor):
    """Half the bytes: float32 rounded to bfloat16."""

    name: ClassVar[str] = "bf16"

    def payload_size(self, numel: int) -> int:
        """Two bytes for each."""
        return 2 * numel

    def encode(self, values: Tensor) -> Tensor:
        """See `BlockwiseCompressor.encode`."""
        return values.bfloat16().view(torch.uint8)

    def decode(self, payload: Tensor, out: Tensor) -> Tensor:
        """See `BlockwiseCompressor.decode`."""
        return out.copy_(payload.view(torch.bfloat16))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Integers(BlockwiseCompressor):
    """Integers between the smallest and the largest value of a block."""

    bits: ClassVar[int]
    # Bytes of a block's scale and smallest value.
    header: ClassVar[int] = 4

    def payload_size(self, numel: int) -> int:
        """Integers, and a scale and a smallest value for each block."""
        return numel * self.bits // 8 + numel // self.block * self.header

    def encode(self, values: Tensor) -> Tensor:
        """See `BlockwiseCompressor.encode`."""
        rows = values.view(-1, self.block)
        if values.device.type == "cpu":
            packed: Tensor = _packers(self.bits)[0](rows)
            return packed.view(-1)
        return self.encode_plainly(rows).view(-1)

    def decode(self, payload: Tensor, out: Tensor) -> Tensor:
        """See `BlockwiseCompressor.decode`."""
        rows = payload.view(-1, self.payload_size(self.block))
        if out.device.type == "cpu":
            return out.copy_(_packers(self.bits)[1](rows).view(-1))
        return out.copy_(self.decode_plainly(rows).view(-1))

    def encode_plainly(self, rows: Tensor) -> Tensor:
        """Encode with tensor operations only; rows are blocks."""
        low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        levels = 2**self.bits - 1
        if self.bits == 8:
            # The kernel keeps away from a division by zero by this much.
            span = high - low
            factor = levels / (span + 1e-8)
            codes = torch.round((rows - low) * factor).to(torch.uint8)
            header = torch.cat([span / levels, low], 1).view(torch.uint8)
            return torch.cat([codes, header], 1)
        low = low.half().float()
        span = high - low
        scale = (span / levels).half()
        scale = torch.where((span == 0) | (scale == 0), torch.ones_like(scale), scale)
        codes = torch.round((rows - low) * (1.0 / scale.float())).clamp(0, levels).to(torch.uint8)
        packed = _join(codes, self.bits)
        return torch.cat([packed, torch.cat([scale, low.half()], 1).view(torch.uint8)], 1)

    def decode_plainly(self, rows: Tensor) -> Tensor:
        """Decode with tensor operations only."""
        codes, header = rows[:, : -self.header], rows[:, -self.header :].contiguous()
        if self.bits == 8:
            numbers = header.view(torch.float32)
            return codes * numbers[:, :1] + numbers[:, 1:]
        numbers = header.view(torch.float16).float()
        return _part(codes, self.bits) * numbers[:, :1] + numbers[:, 1:]


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8(_Integers):
    """A quarter of the bytes: 256 levels in each block."""

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8
    header: ClassVar[int] = 8


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4(_Integers):
    """An eighth of the bytes: 16 levels in each block."""

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int2(_Integers):
    """A sixteenth of the bytes: 4 levels in each block."""

    name: ClassVar[str] = "int2"
    bits: ClassVar[int] = 2


def _packers(bits: int) -> tuple[Any, Any]:
    kernels: Any = torch.ops.quantized
    kind = "byte" if bits == 8 else f"{bits}bit"
    return getattr(kernels, f"embedding_bag_{kind}_prepack"), getattr(kernels, f"embedding_bag_{kind}_unpack")


def _join(codes: Tensor, bits: int) -> Tensor:
    """Small integers side by side in bytes, the first in the lowest bits."""
    per_byte = 8 // bits
    places = codes.view(codes.shape[0], -1, per_byte)
    joined = places[..., 0].clone()
    for index in range(1, per_byte):
        joined |= places[..., index] << (bits * index)
    return joined


def _part(packed: Tensor, bits: int) -> Tensor:
    mask = 2**bits - 1
    parts = [(packed >> (bits * index)) & mask for index in range(8 // bits)]
    return torch.stack(parts, -1).flatten(1)
