"""The largest gradients only, as pairs of index and value.

Aji and Heafield, 2017, arXiv:1704.05021; Lin et al., 2018, arXiv:1712.01887.
"""

import dataclasses
from typing import ClassVar, final

import torch
from torch import Tensor

from lightning_cnnpar.compression.base import Compressor
from lightning_cnnpar.config import ConfigurationError

INDEX_BYTES, VALUE_BYTES = 4, 2
# Of a vector that is longer than this, a sample tells the threshold.
_SAMPLE = 16_384
# The threshold is set so that somewhat more than wanted pass it; the exact choice is among those.
_MARGIN = 1.25


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(Compressor):
    """The share `ratio` of each parameter's gradients that is largest; the rest waits in the residual.

    An index takes four bytes and a value two (bfloat16; what rounding leaves out waits as well).

    Args:
        ratio: Share that is sent, in (0, 1].
    """

    ratio: float = 0.01

    name: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        """Refuse values that can't work."""
        super().__post_init__()
        if not 0 < self.ratio <= 1:
            raise ConfigurationError(f"TopK(ratio={self.ratio!r}): give a share in (0, 1], such as 0.01.")

    def count(self, numel: int) -> int:
        """How many of `numel` elements are sent."""
        return max(1, int(numel * self.ratio + 0.5))


def largest(values: Tensor, count: int) -> Tensor:
    """Indices (int64) of about the `count` largest magnitudes: `count` of them at most, and most often exactly.

    The threshold comes from a sample in regular steps, so all of it is a pure function of the values.
    """
    numel = values.numel()
    if numel <= 4 * _SAMPLE or _MARGIN * count >= numel:
        return torch.topk(values.abs(), count, sorted=False).indices
    magnitudes = values.abs()
    sample = magnitudes[:: numel // _SAMPLE]
    wanted = min(sample.numel(), max(1, round(sample.numel() * _MARGIN * count / numel)))
    threshold = torch.topk(sample, wanted, sorted=True).values[-1]
    candidates = (magnitudes >= threshold).nonzero().view(-1)
    if candidates.numel() <= count:
        return candidates
    chosen = torch.topk(magnitudes[candidates], count, sorted=False).indices
    return candidates[chosen]
