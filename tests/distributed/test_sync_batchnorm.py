"""BatchNorm over all replicas against one BatchNorm over the whole batch, in float64."""

import copy
import dataclasses
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_cnnpar.data_parallel.sync_batchnorm import convert_sync_batchnorm, set_statistics_group
from lightning_cnnpar.mesh import create_mesh
from lightning_cnnpar.pipeline.batchnorm import DeferredStatistics, batch_norms
from tests.distributed.reducing import assert_close
from tests.ranks import RankError, run_ranks

Numbers = dict[str, Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A layer, what it sees, and how the batch is spread."""

    layer: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3, 4, 5)
    sizes: tuple[int, ...] = (2, 2)
    permute: tuple[int, ...] | None = None
    channels_last: bool = False
    steps: int = 3


def _affine() -> nn.Module:
    return nn.BatchNorm2d(3)


def _plain() -> nn.Module:
    return nn.BatchNorm2d(3, affine=False)


def _cumulative() -> nn.Module:
    return nn.BatchNorm2d(3, momentum=None, eps=0.01)


def _untracked() -> nn.Module:
    return nn.BatchNorm2d(3, track_running_stats=False)


def _one() -> nn.Module:
    return nn.BatchNorm1d(3)


def _three() -> nn.Module:
    return nn.BatchNorm3d(3)


def _torchs_own() -> nn.Module:
    return nn.SyncBatchNorm(3)


CASES = {
    "plain": Case(layer=_affine),
    "three replicas": Case(layer=_affine, sizes=(2, 2, 2)),
    "uneven": Case(layer=_affine, sizes=(3, 1)),
    "uneven over three": Case(layer=_affine, sizes=(1, 4, 2)),
    "one replica has nothing": Case(layer=_affine, sizes=(0, 3)),
    "one value on each": Case(layer=_one, shape=(3,), sizes=(1, 1)),
    "channels_last": Case(layer=_affine, channels_last=True),
    "permuted": Case(layer=_affine, shape=(4, 5, 3), permute=(0, 3, 1, 2)),
    "permuted batch": Case(layer=_affine, permute=(0, 1, 3, 2), sizes=(2, 1)),
    "no parameters": Case(layer=_plain),
    "cumulative average": Case(layer=_cumulative),
    "no running statistics": Case(layer=_untracked),
    "1d": Case(layer=_one, shape=(3, 7)),
    "3d": Case(layer=_three, shape=(3, 2, 3, 4)),
    "torch's own class": Case(layer=_torchs_own),
}


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    layer = case.layer().double()
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -1.0, 1.0)
    return layer


def batch_of(case: Case, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    values = torch.randn(sum(case.sizes), *case.shape, generator=generator, dtype=torch.float64) * 3 + step
    if case.permute is not None:
        values = values.permute(case.permute)
    return values.to(memory_format=torch.channels_last) if case.channels_last else values


def run(layer: nn.Module, case: Case, part: slice) -> Numbers:
    """Train, then evaluate: outputs and input gradients of `part` of the batch, and everything that the layer holds."""
    numbers: Numbers = {}
    for step in range(case.steps):
        batch = batch_of(case, step)
        weights = torch.arange(batch.numel(), dtype=torch.float64).view(batch.shape).sin()
        values = batch[part].detach().requires_grad_()
        output = layer(values)
        (output * weights[part] + output.pow(3) * 0.1).sum().backward()
        assert values.grad is not None
        numbers.update({f"output {step}": output.detach(), f"input gradient {step}": values.grad})
    layer.eval()
    with torch.no_grad():
        numbers["evaluation"] = layer(batch_of(case, 99)[part])
    numbers.update({name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None})
    numbers.update({name: buffer for name, buffer in layer.named_buffers() if buffer is not None})
    return numbers


def part_of(case: Case, rank: int) -> slice:
    start = sum(case.sizes[:rank])
    return slice(start, start + case.sizes[rank])


def worker(rank: int, world_size: int, case: Case) -> Numbers:
    warnings.simplefilter("error")
    set_statistics_group(create_mesh(world_size, 1).statistics_group)
    layer = convert_sync_batchnorm(build(case))
    # Copies work like the layer: none of them holds a group.
    return run(copy.deepcopy(layer), case, part_of(case, rank))


@pytest.mark.case("C28")
@pytest.mark.parametrize("name", CASES)
def test_equals_one_batchnorm_over_the_whole_batch(name: str) -> None:
    case = CASES[name]
    ranks = run_ranks(len(case.sizes), worker, case)
    single = build(case)
    if isinstance(single, nn.SyncBatchNorm):
        single = nn.BatchNorm2d(3).double()
        single.load_state_dict(build(case).state_dict())
    expected = run(single, case, slice(None))
    untracked = name == "no running statistics"  # evaluation then uses the local batch, as torch's own layer does
    for key, value in expected.items():
        parts = [rank[key] for rank in ranks]
        if key == "evaluation" and untracked:
            continue
        if key.startswith(("output", "input gradient", "evaluation")):
            assert_close(key, torch.cat(parts), value)
        elif key in ("weight", "bias"):  # gradients: each rank has its share
            assert_close(key, sum(parts), value)
        else:
            for part in parts:
                assert_close(key, part, value)


# --- other dtypes, microbatches, errors ---------------------------------------------------------------------------


def half_precision(rank: int, world_size: int, dtype: torch.dtype, parameters: torch.dtype) -> list[Tensor]:
    set_statistics_group(create_mesh(world_size, 1).statistics_group)
    torch.manual_seed(0)
    layer = convert_sync_batchnorm(nn.BatchNorm2d(3).to(parameters))
    values = torch.randn(4, 3, 5, 5)[2 * rank : 2 * rank + 2].to(dtype).requires_grad_()
    output = layer(values)
    output.float().pow(3).sum().backward()
    assert output.dtype == dtype
    assert values.grad is not None
    assert values.grad.dtype == dtype
    return [output.detach(), values.grad]


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_half_precision_values(parameters: torch.dtype) -> None:
    outputs, grads = zip(*run_ranks(2, half_precision, torch.bfloat16, parameters), strict=True)
    torch.manual_seed(0)
    values = torch.randn(4, 3, 5, 5).bfloat16().float().requires_grad_()
    expected = nn.BatchNorm2d(3)(values)
    expected.pow(3).sum().backward()
    torch.testing.assert_close(torch.cat(outputs).float(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(torch.cat(grads).float(), values.grad, atol=5e-2, rtol=5e-2)


def microbatched(rank: int, world_size: int) -> Numbers:
    """The pipeline's deferred statistics around synchronised layers, with unequal microbatches on both replicas."""
    set_statistics_group(create_mesh(world_size, 1).statistics_group)
    layer = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)).double())
    torch.manual_seed(0)
    parts = torch.randn(9, 3, 4, 4, dtype=torch.float64).tensor_split([1, 3, 5])
    statistics = DeferredStatistics(batch_norms(layer), len(parts[rank::2]))
    with statistics.recording():
        for part in parts[rank::2]:
            statistics.begin(0)
            layer(part)
    statistics.update()
    return dict(layer.named_buffers())


@pytest.mark.case("C24")
def test_deferred_statistics_count_all_replicas() -> None:
    torch.manual_seed(0)
    single = nn.Sequential(nn.BatchNorm2d(3)).double()
    single(torch.randn(9, 3, 4, 4, dtype=torch.float64))
    for buffers in run_ranks(2, microbatched):
        for name, value in single.named_buffers():
            assert_close(name, buffers[name], value)


def too_small(rank: int, world_size: int) -> None:
    set_statistics_group(create_mesh(world_size, 1).statistics_group)
    convert_sync_batchnorm(nn.BatchNorm1d(3))(torch.ones(1 - rank, 3))


def test_one_value_over_all_replicas_is_refused() -> None:
    with pytest.raises(RankError, match="1 value per channel over all 2 replicas"):
        run_ranks(2, too_small)
