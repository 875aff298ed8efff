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
_RAMP_START, _RAMP_FACTOR = 0.04, 4


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(Compressor):
    """The share `ratio` of each parameter's gradients that is largest; the rest waits in the residual.

    An index takes four bytes and a value two (bfloat16; what rounding leaves out waits as well).

    Args:
        ratio: Share that is sent, in (0, 1].
        ramp_steps: Optimizer steps after the warm-up in which the share falls to `ratio`, in stages of a quarter each
            from 4 % on. (Lin et al. start at 25 %; 2 bits of everything, which `warmup_steps` sends, are fewer bytes.)
        momentum: Momentum correction: each rank sends from a velocity rather than from its gradients, and clears the
            velocity where it was sent. The optimizer then has no momentum of its own. Holds for all parameters, also
            those that travel as they are. 0 turns it off.
    """

    ratio: float = 0.01
    ramp_steps: int = 0
    momentum: float = 0.0

    name: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        """Refuse values that can't work."""
        super().__post_init__()
        if not 0 < self.ratio <= 1:
            raise ConfigurationError(f"TopK(ratio={self.ratio!r}): give a share in (0, 1], such as 0.01.")
        self._at_least("ramp_steps", self.ramp_steps, 0)
        if not 0 <= self.momentum < 1:
            raise ConfigurationError(f"TopK(momentum={self.momentum!r}): give a number in [0, 1), such as 0.9.")

    def at_step(self, step: int) -> "TopK":
        """What holds `step` steps after the warm-up: this, or the same with the share that the ramp has come to."""
        if step >= self.ramp_steps:
            return self
        shares = [_RAMP_START]
        while shares[-1] / _RAMP_FACTOR > self.ratio:
            shares.append(shares[-1] / _RAMP_FACTOR)
        share = shares[step * len(shares) // self.ramp_steps]
        return dataclasses.replace(self, ratio=max(share, self.ratio))

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
