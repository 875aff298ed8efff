"""The largest gradients only, as pairs of index and value.

Aji and Heafield, 2017, arXiv:1704.05021; Lin et al., 2018, arXiv:1712.01887.
"""

import dataclasses
import math
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from lightning_cnnpar.compression.base import Compressor
from lightning_cnnpar.config import ConfigurationError

INDEX_BYTES, VALUE_BYTES = 4, 2
# Shorter vectors are sorted as a whole. The stride of the sample is a prime: it doesn't follow rows or channels.
_SAMPLED_FROM, _STRIDE = 65_536, 101
# Values that fit the second-level cache of a core.
_TILE = 131_072
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
    """Indices (int64, ascending) of the `count` largest magnitudes; fewer only if all others are zero.

    Of a long vector on a CPU, a sample tells a threshold that somewhat more than wanted reach, and only those are
    sorted. What is found doesn't depend on the sample, and equal magnitudes are always resolved alike.
    """
    if values.device.type != "cpu" or values.numel() < _SAMPLED_FROM or 8 * count > values.numel():
        return torch.topk(values.abs(), count, sorted=False).indices.sort().values
    candidates = _reaching(values, _threshold(values, count))
    if candidates.numel() < count:
        # The sample misled, or there is less than that: look at all that is not zero.
        candidates = _reaching(values, 0.0)
        if candidates.numel() <= count:
            return candidates
    chosen = torch.topk(values[candidates].abs_(), count, sorted=False).indices
    return candidates[chosen].sort().values


def _threshold(values: Tensor, count: int) -> float:
    """A magnitude that most likely a few more than `count` values reach."""
    sample = values[::_STRIDE].abs()
    expected = count * sample.numel() / values.numel()
    # How many of the largest fall into the sample varies: three standard deviations of that are added.
    wanted = min(sample.numel(), math.ceil(expected + 3 * math.sqrt(expected)) + 1)
    return float(torch.topk(sample, wanted, sorted=False).values.min())


def _reaching(values: Tensor, threshold: float) -> Tensor:
    """Indices of the values of at least that magnitude; of those that are not zero, if it is zero."""
    if threshold == 0:
        return torch.from_numpy(np.flatnonzero(values.numpy()))
    magnitudes = torch.empty(_TILE)
    found = []
    for begin in range(0, values.numel(), _TILE):
        tile = values[begin : begin + _TILE]
        reached = torch.abs(tile, out=magnitudes[: tile.numel()]) >= threshold
        # NumPy's search for what is true is several times faster than torch's.
        found.append(np.flatnonzero(reached.numpy()) + begin)
    return torch.from_numpy(np.concatenate(found))
