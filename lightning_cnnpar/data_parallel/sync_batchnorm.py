"""BatchNorm over the batches of all replicas, on CPU too.

On CUDA this is torch's own function. On CPU, which that refuses, the statistics are exchanged here. For the values x of
a channel, spread over ranks r with counts n_r, means m_r and sums of squared deviations s_r (Chan, Golub and LeVeque,
1979):

    forward     N = sum n_r    m = sum n_r m_r / N    v = (sum s_r + sum n_r (m_r - m)^2) / N
                y = w (x - m) / sqrt(v + eps) + b
    backward    x_hat = (x - m) / sqrt(v + eps)
                dx = w / sqrt(v + eps) (dy - sum dy / N - x_hat sum(dy x_hat) / N)        sums over all ranks
                dw = sum(dy x_hat)    db = sum dy                                         this rank's share
"""

import warnings
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_cnnpar._compat import is_fake, sync_batch_norm

_LAZY = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, *_LAZY)

_group: dist.ProcessGroup | None = None


def set_statistics_group(group: dist.ProcessGroup | None) -> None:
    """Choose the ranks that every `SyncBatchNorm` of this process shares statistics with; `None` for no others.

    Modules look it up when they run. They never hold it, so they can be copied and pickled.
    """
    global _group
    _group = group


def statistics_group() -> dist.ProcessGroup | None:
    """What `set_statistics_group` chose."""
    return _group


@final
class SyncBatchNorm(nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm` for any device, over the ranks of `statistics_group()`.

    Outputs, gradients and buffers are those of one BatchNorm over the batches of all ranks side by side, which may
    differ in size and may be empty on some. Every rank of the group has to call it equally often in training.

    Attributes:
        last_count: Values per channel that went into the statistics of the last forward in training, over all ranks: an
            `int`, or on CUDA a tensor of one element.
    """

    last_count: int | Tensor | None = None

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group of the process."""
        return _group

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup | None) -> None:
        if group is not None:
            raise ValueError(
                "SyncBatchNorm holds no process group, so that it can be copied and pickled: leave `process_group` out"
                " and call `set_statistics_group(group)` once in each process."
            )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that BatchNorm's forward has
        """Normalise over (N, *) of the group in training, with the running statistics in evaluation."""
        if input.dim() < 2 or input.shape[1] == 0:
            raise ValueError(
                f"Expected an input of shape (N, C, ...) with at least one channel, got {tuple(input.shape)}."
            )
        if not self.training:
            tracked = self.running_mean is not None
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, not tracked, 0.0, self.eps
            )
        factor = self._count_batch()
        mean, var = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        group = _group
        # A network that is being traced gives tensors without values: there is nothing to share, and nobody to share
        # with.
        if group is None or dist.get_world_size(group) == 1 or is_fake(input):
            self.last_count = _count(input)
            return F.batch_norm(input, mean, var, self.weight, self.bias, True, factor, self.eps)
        if input.is_cuda:
            self.last_count = _count_over(group, input)
            return sync_batch_norm(input, self.weight, self.bias, mean, var, self.eps, factor, group)
        batch_mean, batch_var, self.last_count = _statistics(input, group)
        if mean is not None and var is not None:
            _update(mean, batch_mean, factor)
            _update(var, batch_var * (self.last_count / (self.last_count - 1)), factor)
        output: Tensor = _Normalize.apply(
            input, self.weight, self.bias, batch_mean, batch_var, self.eps, self.last_count, group
        )
        return output

    def _count_batch(self) -> float:
        """Count a forward in training, and return the weight of its statistics in the running ones."""
        if not self.track_running_stats:
            return 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # cumulative average
                return 1.0 / float(self.num_batches_tracked)
        return 0.0 if self.momentum is None else self.momentum


class _Normalize(torch.autograd.Function):
    """Normalises with given statistics, with the gradient that goes through the statistics of the whole group."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        eps: float,
        count: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        kind = _statistics_dtype(values)
        mean, var = mean.to(kind), var.to(kind)
        ctx.save_for_backward(values, weight, mean, torch.rsqrt(var + eps))
        ctx.count, ctx.group = count, group
        # Half-precision values with statistics and parameters in float32 are one of the kernel's own cases.
        weight, bias = (None if tensor is None else tensor.to(kind) for tensor in (weight, bias))
        return F.batch_norm(values, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, mean, invstd = ctx.saved_tensors
        kind = mean.dtype
        dy = grad.to(kind)
        x_hat = (values.to(kind) - _by_channel(mean, values)).mul_(_by_channel(invstd, values))
        dims = _all_but_channels(values)
        sum_dy, sum_dy_x_hat = dy.sum(dims), (dy * x_hat).sum(dims)
        grad_values = None
        if ctx.needs_input_grad[0]:
            # Also by ranks with an empty batch: the others wait for them.
            total = torch.stack([sum_dy, sum_dy_x_hat]).double()
            dist.all_reduce(total, group=ctx.group)
            mean_dy, mean_dy_x_hat = (total / ctx.count).to(kind)
            scale = invstd if weight is None else invstd * weight.to(kind)
            # In place from here on: these are passes over whole activations.
            statistics_part = x_hat.mul_(_by_channel(mean_dy_x_hat, values)).add_(_by_channel(mean_dy, values))
            grad_values = (dy - statistics_part).mul_(_by_channel(scale, values)).to(values.dtype)
        grad_weight = sum_dy_x_hat.to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = sum_dy.to(weight.dtype) if ctx.needs_input_grad[2] else None
        return grad_values, grad_weight, grad_bias, None, None, None, None, None


def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Turn every BatchNorm layer of `module` into a `SyncBatchNorm`, in place.

    Layers stay the same objects with the same parameters, buffers, hooks and flags; only their class changes. Layers of
    classes with a `forward` of their own stay as they are, with a warning.
    """
    for name, layer in module.named_modules():
        if not isinstance(layer, _BATCH_NORMS) or isinstance(layer, SyncBatchNorm):
            continue
        if not _is_plain(layer):
            _warn_left_alone(name, layer)
            continue
        vars(layer)["_class_before_sync"] = type(layer)
        vars(layer).pop("process_group", None)
        object.__setattr__(layer, "__class__", SyncBatchNorm)
    return module


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Undo `convert_sync_batchnorm`, in place."""
    for layer in module.modules():
        before = vars(layer).pop("_class_before_sync", None) if isinstance(layer, SyncBatchNorm) else None
        if before is not None:
            vars(layer).pop("last_count", None)
            object.__setattr__(layer, "__class__", before)
            if issubclass(before, nn.SyncBatchNorm):
                vars(layer)["process_group"] = None
    return module


def _is_plain(layer: nn.Module) -> bool:
    """Whether the layer does what torch's layers do, with parameters that exist."""
    forwards = (nn.BatchNorm2d.forward, nn.SyncBatchNorm.forward)
    return type(layer).forward in forwards and not isinstance(layer, _LAZY)


def _warn_left_alone(name: str, layer: nn.Module) -> None:
    kind = type(layer)
    reason = "its parameters don't exist before the first forward"
    if not isinstance(layer, _LAZY):
        reason = f"{kind.__qualname__} has a forward of its own"
    warnings.warn(
        f"{name!r} is a {kind.__module__}.{kind.__qualname__} and keeps its own statistics on each replica, since"
        f" {reason}. Use torch.nn.BatchNorm2d (or 1d, 3d) there, followed by what the layer does in addition.",
        stacklevel=3,
    )


@torch.no_grad()
def _statistics(values: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, int]:
    """Mean, biased variance and count over the values of all ranks, by channel, in float64."""
    channels, count = values.shape[1], _count(values)
    own = torch.zeros(3, channels, dtype=torch.float64, device=values.device)
    if count:
        var, mean = torch.var_mean(values.to(_statistics_dtype(values)), _all_but_channels(values), correction=0)
        own[0], own[1], own[2] = count, mean, var * count
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    counts, means, deviations = torch.stack(gathered, dim=1)
    total = int(counts[:, 0].sum())
    if total < 2:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {tuple(values.shape)} here and"
            f" {total} value per channel over all {len(gathered)} replicas. Use larger batches, or `drop_last=True`."
        )
    mean = (counts * means).sum(0) / total
    var = (deviations + counts * (means - mean) ** 2).sum(0) / total
    return mean, var, total


def _count_over(group: dist.ProcessGroup, values: Tensor) -> Tensor:
    # Stays on the device: nobody has to wait for it.
    count = torch.full((), _count(values), dtype=torch.float64, device=values.device)
    dist.all_reduce(count, group=group)
    return count


@torch.no_grad()
def _update(running: Tensor, current: Tensor, factor: float) -> None:
    running.mul_(1.0 - factor).add_(current.to(running.dtype), alpha=factor)


def _count(values: Tensor) -> int:
    return values.numel() // values.shape[1]


def _statistics_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _all_but_channels(values: Tensor) -> list[int]:
    return [dim for dim in range(values.dim()) if dim != 1]


def _by_channel(vector: Tensor, values: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (values.dim() - 2))
