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


class _Use:
    """What one use of a layer saw: per microbatch the count per channel, the mean and the unbiased variance."""

    def __init__(self, module: Any, num_microbatches: int) -> None:
        self.counts: list[int | Tensor] = []
        self.rows = _zeros(module.running_mean, num_microbatches), _zeros(module.running_var, num_microbatches)
        self._row_lists = self.rows[0].unbind(), self.rows[1].unbind()

    def next_row(self) -> tuple[Tensor, Tensor]:
        """Where the next microbatch's mean and variance go."""
        row = len(self.counts)
        return self._row_lists[0][row], self._row_lists[1][row]


@dataclasses.dataclass
class _Layer:
    """A layer and its uses, by stage and by number within the stage: stages may share a layer."""

    module: Any
    num_microbatches: int
    uses: dict[tuple[int, int], _Use] = dataclasses.field(default_factory=dict)
    stage: int = 0
    next_use: int = 0

    def begin(self, stage: int) -> None:
        self.stage, self.next_use = stage, 0

    def use(self) -> _Use:
        """The record of the use that comes now."""
        key = (self.stage, self.next_use)
        self.next_use += 1
        if key not in self.uses:
            self.uses[key] = _Use(self.module, self.num_microbatches)
        return self.uses[key]

    def take(self) -> list[_Use]:
        """All uses, in order."""
        uses, self.uses = [self.uses[key] for key in sorted(self.uses)], {}
        return uses


class DeferredStatistics:
    """Records what BatchNorm layers see during one network call and updates them once.

    Args:
        modules: The layers. Those that are frozen or track no statistics are left alone.
        num_microbatches: How many the call has.
    """

    def __init__(self, modules: Iterable[nn.Module], num_microbatches: int) -> None:
        self._layers = [_Layer(module, num_microbatches) for module in modules if updates_statistics(module)]

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Note the statistics of forwards inside of the block, and leave the layers' buffers as they are."""
        return self._instead(_recording_forward)

    def ignoring(self) -> contextlib.AbstractContextManager[None]:
        """Only leave the buffers as they are: for forwards that are computed again and have been counted already."""
        return self._instead(_ignoring_forward)

    @contextlib.contextmanager
    def _instead(self, make: Callable[["_Layer"], Callable[[Tensor], Tensor]]) -> Iterator[None]:
        outside = [vars(layer.module).get("forward") for layer in self._layers]
        for layer in self._layers:
            # On the instance, so that the module's own hooks still run around it and see the same inputs.
            vars(layer.module)["forward"] = make(layer)
        try:
            yield
        finally:
            for layer, forward in zip(self._layers, outside, strict=True):
                if forward is None:
                    del vars(layer.module)["forward"]
                else:
                    vars(layer.module)["forward"] = forward

    def begin(self, stage: int) -> None:
        """Say that a stage begins with another microbatch."""
        for layer in self._layers:
            layer.begin(stage)

    @torch.no_grad()
    def update(self) -> None:
        """Update the layers as the whole mini-batch would have."""
        taken = [(layer.module, layer.take()) for layer in self._layers]
        for i in range(max((len(uses) for _, uses in taken), default=0)):
            _update([(module, uses[i]) for module, uses in taken if i < len(uses)])


def batch_norms(root: nn.Module) -> list[nn.Module]:
    """The BatchNorm layers below `root`, those of other ranks' stages too: all ranks must decide alike."""
    return [module for module in root.modules() if isinstance(module, _BatchNorm)]


def updates_statistics(module: nn.Module) -> bool:
    """Whether a forward of this layer would change its running statistics."""
    layer: Any = module
    return bool(layer.training and layer.track_running_stats and layer.running_mean is not None)


def _recording_forward(layer: _Layer) -> Callable[[Tensor], Tensor]:
    module, inner = layer.module, layer.module.forward

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - the name that BatchNorm's forward has
        use = layer.use()
        output = _run_with(module, inner, input, *use.next_row())
        use.counts.append(_count(module, input))
        return output

    return forward


def _ignoring_forward(layer: _Layer) -> Callable[[Tensor], Tensor]:
    module, inner = layer.module, layer.module.forward

    def forward(input: Tensor) -> Tensor:  # noqa: A002
        return _run_with(
            module, inner, input, torch.zeros_like(module.running_mean), torch.zeros_like(module.running_var)
        )

    return forward


def _run_with(module: Any, inner: Callable[[Tensor], Tensor], x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Run a layer that writes its statistics, as they are, to `mean` and `variance`."""
    buffers, attributes = module_buffers(module), vars(module)
    kept, momentum = dict(buffers), module.momentum
    buffers.update(running_mean=mean, running_var=variance, num_batches_tracked=None)
    attributes["momentum"] = 1.0
    try:
        return inner(x)
    finally:
        buffers.update(kept)
        attributes["momentum"] = momentum


def _zeros(like: Tensor, rows: int) -> Tensor:
    return torch.zeros((rows, *like.shape), dtype=like.dtype, device=like.device)


def _count(module: Any, values: Tensor) -> int | Tensor:
    """Values per channel that went into the statistics; a synchronised layer knows those of the other replicas."""
    count: int | Tensor | None = getattr(module, "last_count", None)
    return values.numel() // values.shape[1] if count is None else count


def _update(updates: Sequence[tuple[Any, _Use]]) -> None:
    """Give each layer one update. Channels of all layers are merged side by side: few kernels for many layers."""
    alike: dict[Any, list[tuple[Any, _Use]]] = {}
    for module, use in updates:
        rows = use.rows[0]
        alike.setdefault((rows.dtype, rows.device, len(use.counts)), []).append((module, use))
    for group in alike.values():
        mean, variance = _merge([use for _, use in group])
        channels = [use.rows[0].shape[1] for _, use in group]
        _move([module for module, _ in group], torch.split(mean, channels), torch.split(variance, channels))


def _merge(uses: Sequence[_Use]) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of the mini-batch, for the channels of all uses in a row."""
    first, count = uses[0].rows[0], len(uses[0].counts)
    dtype = torch.promote_types(first.dtype, torch.float32)
    means, variances = (torch.cat([use.rows[i][:count] for use in uses], dim=1).to(dtype) for i in (0, 1))
    channels = tuple(use.rows[0].shape[1] for use in uses)
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
