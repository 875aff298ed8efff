"""BatchNorm statistics of a mini-batch that runs as microbatches.

A microbatch is normalised with its own statistics, but running mean, running variance and `num_batches_tracked` must
end as if the layer had met the whole mini-batch once. While a call runs, each layer writes to scratch buffers with
momentum 1, so that its own kernel hands over the mean and the unbiased variance of each microbatch for free. At the end
they are merged (Chan, Golub and LeVeque, 1979): for counts n, means m and unbiased variances v,

    N = sum n      mean = sum n m / N      var = (sum (n - 1) v + sum n (m - mean)^2) / (N - 1)

A layer that is used several times in one forward gets one update for each use, in order.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_cnnpar._compat import increment_tensors, interpolate_tensors, module_buffers


@dataclasses.dataclass
class _Use:
    """What one use of a layer saw: per microbatch the count per channel, the mean and the unbiased variance."""

    counts: list[int | Tensor] = dataclasses.field(default_factory=list)
    means: list[Tensor] = dataclasses.field(default_factory=list)
    variances: list[Tensor] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Layer:
    module: Any
    uses: list[_Use] = dataclasses.field(default_factory=list)
    next_use: int = 0

    def record(self, count: int | Tensor, mean: Tensor, variance: Tensor) -> None:
        if self.next_use == len(self.uses):
            self.uses.append(_Use())
        use = self.uses[self.next_use]
        self.next_use += 1
        use.counts.append(count)
        use.means.append(mean)
        use.variances.append(variance)


class DeferredStatistics:
    """Records what BatchNorm layers see during one network call and updates them once.

    Args:
        modules: The layers. Those that are frozen or track no statistics are left alone.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._layers = [_Layer(module) for module in modules if updates_statistics(module)]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Keep the layers' buffers untouched inside of the block."""
        outside = [vars(layer.module).get("forward") for layer in self._layers]
        for layer in self._layers:
            # On the instance, so that the module's own hooks still run around it and see the same inputs.
            vars(layer.module)["forward"] = _recording_forward(layer)
        try:
            yield
        finally:
            for layer, forward in zip(self._layers, outside, strict=True):
                if forward is None:
                    del vars(layer.module)["forward"]
                else:
                    vars(layer.module)["forward"] = forward

    def begin_microbatch(self) -> None:
        """Say that the forward of another microbatch begins."""
        for layer in self._layers:
            layer.next_use = 0

    @torch.no_grad()
    def update(self) -> None:
        """Update the layers as the whole mini-batch would have."""
        rounds = max((len(layer.uses) for layer in self._layers), default=0)
        for i in range(rounds):
            _update([(layer.module, layer.uses[i]) for layer in self._layers if i < len(layer.uses)])


def batch_norms(root: nn.Module) -> list[nn.Module]:
    """The BatchNorm layers below `root`, those of other ranks' stages too: all ranks must decide alike."""
    return [module for module in root.modules() if isinstance(module, _BatchNorm)]


def updates_statistics(module: nn.Module) -> bool:
    """Whether a forward of this layer would change its running statistics."""
    layer: Any = module
    return bool(layer.training and layer.track_running_stats and layer.running_mean is not None)


def _recording_forward(layer: _Layer) -> Callable[[Tensor], Tensor]:
    module = layer.module
    inner = module.forward

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - the name that BatchNorm's forward has
        buffers = module_buffers(module)
        kept, momentum = dict(buffers), module.momentum
        mean, variance = torch.zeros_like(module.running_mean), torch.zeros_like(module.running_var)
        buffers.update(running_mean=mean, running_var=variance, num_batches_tracked=None)
        module.momentum = 1.0
        try:
            output: Tensor = inner(input)
        finally:
            buffers.update(kept)
            module.momentum = momentum
        layer.record(_count(module, input), mean, variance)
        return output

    return forward


def _count(module: Any, values: Tensor) -> int | Tensor:
    """Values per channel that went into the statistics; a synchronised layer knows those of the other replicas."""
    count: int | Tensor | None = getattr(module, "last_count", None)
    return values.numel() // values.shape[1] if count is None else count


def _update(updates: Sequence[tuple[Any, _Use]]) -> None:
    """Give each layer one update. Channels of all layers are merged side by side: few kernels for many layers."""
    alike: dict[Any, list[tuple[Any, _Use]]] = {}
    for module, use in updates:
        mean = use.means[0]
        alike.setdefault((mean.dtype, mean.device, len(use.counts)), []).append((module, use))
    for group in alike.values():
        mean, variance = _merge([use for _, use in group])
        channels = [use.means[0].numel() for _, use in group]
        _move([module for module, _ in group], torch.split(mean, channels), torch.split(variance, channels))


def _merge(uses: Sequence[_Use]) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of the mini-batch, for the channels of all uses in a row."""
    first = uses[0].means[0]
    dtype = torch.promote_types(first.dtype, torch.float32)
    rows = range(len(uses[0].counts))
    means = torch.stack([torch.cat([use.means[row] for use in uses]) for row in rows]).to(dtype)
    variances = torch.stack([torch.cat([use.variances[row] for use in uses]) for row in rows]).to(dtype)
    channels = tuple(use.means[0].numel() for use in uses)
    counts = tuple(tuple(use.counts) for use in uses)
    if all(isinstance(count, int) for row in counts for count in row):
        share, within, between = _cached_weights(counts, channels, dtype, first.device)
    else:
        table = [torch.stack([torch.as_tensor(n, dtype=dtype, device=first.device) for n in row]) for row in counts]
        share, within, between = _weights(torch.stack(table), channels)
    mean = (share * means).sum(0)
    return mean, (within * variances + between * (means - mean).square()).sum(0)


@functools.lru_cache(maxsize=64)
def _cached_weights(
    counts: tuple[tuple[int, ...], ...], channels: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    # Counts repeat from step to step; kept on the device, they cost no transfer.
    with torch.inference_mode(False):
        return _weights(torch.tensor(counts, dtype=dtype, device=device), channels)


def _weights(counts: Tensor, channels: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The factors n / N, (n - 1) / (N - 1) and n / (N - 1) by microbatch and channel.

    Args:
        counts: n by layer and microbatch.
        channels: Channels of each layer.
    """
    repeats = torch.tensor(channels, device=counts.device)
    n = counts.T.repeat_interleave(repeats, dim=1, output_size=sum(channels))
    total = n.sum(0)
    return n / total, (n - 1) / (total - 1), n / (total - 1)


def _move(modules: Sequence[Any], means: Sequence[Tensor], variances: Sequence[Tensor]) -> None:
    tracked = [module.num_batches_tracked for module in modules if module.num_batches_tracked is not None]
    increment_tensors(tracked)
    by_factor: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
    for module, mean, variance in zip(modules, means, variances, strict=True):
        targets, sources = by_factor.setdefault(_factor(module), ([], []))
        targets += [module.running_mean, module.running_var]
        sources += [mean.to(module.running_mean.dtype), variance.to(module.running_var.dtype)]
    for factor, (targets, sources) in by_factor.items():
        interpolate_tensors(targets, sources, factor)


def _factor(module: Any) -> float:
    if module.momentum is not None:
        return float(module.momentum)
    # No momentum asks for the cumulative average.
    return 0.0 if module.num_batches_tracked is None else 1.0 / float(module.num_batches_tracked)
