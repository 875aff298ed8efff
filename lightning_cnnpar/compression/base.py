"""What every compressor has in common: its options, and how it is named.

kind        exchange                                        compressors
blockwise   all-to-all ─► sum ─► all-gather, both encoded   BFloat16, Int8, Int4, Int2, OneBit
sparse      all-gather of (index, value)                    TopK
low-rank    two small all-reduces                           PowerSGD
"""

import dataclasses
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lightning_cnnpar.config import ConfigurationError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compressor:
    """Options of every compressor.

    Args:
        error_feedback: Add what compression left out to the next step's gradient (Karimireddy et al., 2019,
            arXiv:1901.09847).
        warmup_steps: Optimizer steps at the start that are compressed less, to 2 bits.
        min_numel: Parameters with fewer elements travel as they are.
        exclude: Patterns (`fnmatch`) of parameter names that travel as they are. Parameters with one dimension
            (biases, BatchNorm) always do.

    Raises:
        ConfigurationError: For values that can't work.
    """

    error_feedback: bool = True
    warmup_steps: int = 0
    min_numel: int = 2048
    exclude: tuple[str, ...] = ()

    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Refuse values that can't work."""
        self._at_least("warmup_steps", self.warmup_steps, 0)
        self._at_least("min_numel", self.min_numel, 1)
        if isinstance(self.exclude, str):
            raise ConfigurationError(
                f"exclude={self.exclude!r}: give a tuple of patterns, such as ({self.exclude!r},)."
            )

    def _at_least(self, option: str, value: int, least: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigurationError(
                f"{type(self).__name__}({option}={value!r}): give a whole number of at least {least}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockwiseCompressor(Compressor, ABC):
    """Encodes each block of a vector by itself. Pure functions of tensors, without state.

    Args:
        block: Elements that share a scale.
    """

    block: int = 256

    def __post_init__(self) -> None:
        """Refuse values that can't work."""
        super().__post_init__()
        self._at_least("block", self.block, 8)
        if self.block % 8:
            raise ConfigurationError(f"{type(self).__name__}(block={self.block}): give a multiple of 8.")

    @abstractmethod
    def payload_size(self, numel: int) -> int:
        """Bytes that `numel` elements (whole blocks) take."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Encode.

        Args:
            values: float32, one dimension, whole blocks, finite, of magnitude 2 at most.

        Returns:
            uint8 of `payload_size(values.numel())` elements.
        """

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor) -> Tensor:
        """Decode into `out` (float32, one dimension, whole blocks), and return it."""

    def align(self, numel: int) -> int:
        """`numel` rounded up to whole blocks."""
        return -(-numel // self.block) * self.block


def exponent_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """The power of two that brings values near 1, and whether all of them are finite.

    Args:
        values: float32, at least one.

    Returns:
        The exponent k (int8, no dimension), such that |values| / 2^k is at most 1, and a bool without dimension.
    """
    low, high = torch.aminmax(values)
    largest = torch.maximum(low.abs(), high.abs())
    finite = torch.isfinite(largest)
    _, exponent = torch.frexp(torch.where(finite, largest, torch.ones_like(largest)))
    return exponent.clamp(-126, 127).to(torch.int8), finite
