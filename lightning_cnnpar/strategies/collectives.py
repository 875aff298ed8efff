"""What a run agrees on over the data axis: logged values, metrics and norms.

All ranks of a replica compute the same values, so a mean over *all* ranks would only weigh them alike, but a sum or a
concatenation would count each sample P times. Everything here runs over the D ranks that hold the same stage.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_cnnpar._compat import caller_metric_name
from lightning_cnnpar.mesh import Mesh, meet

# Small tensors are reduced by gathering them together with the name of what is reduced.
_CHECKED_NUMEL = 64

_current_mesh = Mesh()


def use_mesh(mesh: Mesh) -> None:
    """Let metrics of this process gather over the data axis of `mesh`."""
    global _current_mesh
    _current_mesh = mesh


def gather_over_data(value: Tensor, group: Any = None) -> list[Tensor]:
    """What `torchmetrics` calls to gather a state: over the replicas, not over all ranks.

    A module-level function, so metrics can still be copied and pickled.
    """
    if group is None and _current_mesh.data_group is None:
        return [value]
    gathered: list[Tensor] = gather_all_tensors(value, group if group is not None else _current_mesh.data_group)
    return gathered


def gather_metrics_over_data(module: nn.Module) -> None:
    """Set the gathering function of each metric in a module that has none of its own."""
    for submodule in module.modules():
        if isinstance(submodule, Metric) and submodule.dist_sync_fn is None:
            submodule.dist_sync_fn = gather_over_data


def reduce_over_data(value: Any, mesh: Mesh, group: Any, op: Any) -> Any:
    """Sum, mean, minimum or maximum of a tensor over the replicas.

    Args:
        value: A tensor; anything else is returned as it is.
        mesh: The grid.
        group: Process group to use in place of the data axis.
        op: "mean", "avg", "sum", "min", "max" or a `ReduceOp`; `None` is "mean".

    Raises:
        DifferentPointsError: If another replica does something else at this point, with the names of both.
    """
    if not isinstance(value, Tensor):
        return value
    if group is None and mesh.data_size == 1:
        return value
    name = op.lower() if isinstance(op, str) else _name(op)
    if group is None and mesh.data_control_group is not None and 0 < value.numel() <= _CHECKED_NUMEL:
        return _checked_reduce(value, mesh, name)
    group = group if group is not None else mesh.data_group
    reduced = value.clone().contiguous()
    is_mean = name in ("mean", "avg")
    if is_mean and not reduced.is_floating_point():
        reduced = reduced.float()
    dist.all_reduce(reduced, op=dist.ReduceOp.SUM if is_mean else _operation(name), group=group)
    return reduced / dist.get_world_size(group) if is_mean else reduced


def stack_over_replicas(tensor: Tensor, mesh: Mesh, *, differentiable: bool) -> Tensor:
    """The tensors of all replicas, which have the same shape, as one of shape (D, ...).

    Args:
        tensor: This replica's.
        mesh: The grid.
        differentiable: Let gradients flow back: each replica gets the sum of all replicas' gradients for its part.
    """
    if mesh.data_size == 1:
        return tensor.unsqueeze(0)
    if differentiable:
        stacked: Tensor = _Stack.apply(tensor, mesh.statistics_group)
        return stacked
    with torch.no_grad():
        return _stack(tensor, mesh.statistics_group)


class _Stack(torch.autograd.Function):
    # torch.distributed.nn.functional.all_gather confuses ranks of the world with those of a group on gloo.
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _stack(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed[dist.get_rank(ctx.group)], None


def _stack(tensor: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.stack(parts)


def _checked_reduce(value: Tensor, mesh: Mesh, op: str) -> Tensor:
    """Reduce a few numbers and check that every replica means the same ones."""
    exact = value.detach().cpu().to(torch.float64 if value.is_floating_point() else torch.int64).reshape(-1)
    what = f"reduces {caller_metric_name() or 'a value'!r} ({op}, shape {tuple(value.shape)})"
    rows = meet(mesh, what, exact.numpy().tobytes())
    values = torch.stack([torch.frombuffer(bytearray(row), dtype=exact.dtype) for row in rows])
    return _combine(values, op).reshape(value.shape).to(value.device, _result_dtype(value, op))


def _combine(values: Tensor, op: str) -> Tensor:
    if op in ("mean", "avg"):
        return values.double().mean(dim=0)
    if op == "sum":
        return values.sum(dim=0)
    if op == "min":
        return values.amin(dim=0)
    if op == "max":
        return values.amax(dim=0)
    return values.prod(dim=0)


def _result_dtype(value: Tensor, op: str) -> torch.dtype:
    return torch.float32 if op in ("mean", "avg") and not value.is_floating_point() else value.dtype


_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def _operation(name: str) -> Any:
    if name not in _OPERATIONS:
        raise ValueError(f"Unknown reduction {name!r}. Known: mean, avg, {', '.join(_OPERATIONS)}.")
    return _OPERATIONS[name]


def _name(op: Any) -> str:
    if op is None or op == dist.ReduceOp.AVG:
        return "mean"
    return next((name for name, known in _OPERATIONS.items() if op == known), str(op))


def clip_grad_norm_over_stages(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    mesh: Mesh,
    is_staged: Callable[[Tensor], bool],
    is_piece: Callable[[Tensor], bool] | None = None,
    device: torch.device,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` with the 2-norm over all stages of the replica.

    Args:
        parameters: Parameters, placeholders among them.
        max_norm: Largest norm allowed.
        mesh: The grid.
        is_staged: Tells of a parameter whether only this rank of the replica holds it; squares of others count once.
        is_piece: Tells of a parameter whether its gradient is a piece, with the rest on other replicas; `None` if
            there are no pieces.
        device: Where this rank computes.

    Returns:
        The norm before clipping, the same on all ranks of the replica.
    """
    here = [parameter for parameter in parameters if parameter.grad is not None]
    is_cut = is_piece or (lambda parameter: False)
    # Squares: pieces of a stage, whole ones of a stage, pieces of what every stage has.
    squares = [
        _norm([p.grad for p in here if is_staged(p) == staged and is_cut(p) == piece], device) ** 2
        for staged, piece in ((True, True), (True, False), (False, True), (False, False))
    ]
    pieces = torch.stack([squares[0], squares[2]])
    if is_piece is not None:
        dist.all_reduce(pieces, group=mesh.data_group)
    staged_square = pieces[0] + squares[1]
    if mesh.pipeline_group is not None:
        dist.all_reduce(staged_square, group=mesh.pipeline_group)
    total = torch.sqrt(staged_square + pieces[1] + squares[3])
    torch.nn.utils.clip_grads_with_norm_(here, max_norm, total)
    return total


def _norm(gradients: list[Tensor | None], device: torch.device) -> Tensor:
    present = [gradient for gradient in gradients if gradient is not None]
    norm: Tensor = torch.nn.utils.get_total_norm(present)
    # All ranks of a replica sum in one type, also those whose stage has no gradient.
    return norm.to(device, torch.float64)
