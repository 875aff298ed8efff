import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cnnpar.pipeline.batchnorm import DeferredStatistics, batch_norms


def _compare(deferred: nn.Module, whole: nn.Module, tolerance: float = 1e-12) -> None:
    expected = dict(whole.named_buffers())
    for name, buffer in deferred.named_buffers():
        torch.testing.assert_close(buffer, expected[name], rtol=0, atol=tolerance, msg=lambda text: f"{name}: {text}")  # noqa: B023


def _in_microbatches(module: nn.Module, x: Tensor, sizes: list[int]) -> None:
    statistics = DeferredStatistics(batch_norms(module), len(sizes))
    with statistics.recording():
        for part in torch.split(x, sizes):
            statistics.begin(0)
            module(part).sum().backward()
    statistics.update()


@pytest.mark.case("C24")
@pytest.mark.parametrize("sizes", [[8], [4, 4], [3, 3, 2]])
@pytest.mark.parametrize("momentum", [0.1, None, 1.0])
def test_one_layer_sees_the_whole_batch(sizes: list[int], momentum: float | None) -> None:
    module: Any = nn.BatchNorm2d(3, momentum=momentum).double()
    whole = copy.deepcopy(module)
    for _ in range(3):
        x = torch.randn(8, 3, 4, 4, dtype=torch.float64) * 3 + 1
        _in_microbatches(module, x, sizes)
        whole(x)
    _compare(module, whole)
    assert module.num_batches_tracked == 3


def test_several_layers_of_several_kinds() -> None:
    net = nn.Sequential(
        nn.BatchNorm2d(3), nn.SyncBatchNorm(3), nn.BatchNorm2d(3, momentum=0.3), nn.Flatten(), nn.BatchNorm1d(12)
    ).double()
    net[1].eval()
    whole = copy.deepcopy(net)
    x = torch.randn(6, 3, 2, 2, dtype=torch.float64)
    # Later layers see normalised microbatches; only the first one has the same inputs as with the whole batch.
    _in_microbatches(net, x, [3, 3])
    whole(x)
    _compare(net[0], whole[0])
    _compare(net[1], whole[1])
    assert [b.item() for name, b in net.named_buffers() if name.endswith("tracked")] == [1, 0, 1, 1]


def test_a_layer_used_twice_is_updated_twice_in_order() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            self.norm(x)
            out: Tensor = self.norm(2 * x + 1)
            return out

    net = Twice().double()
    whole = copy.deepcopy(net)
    x = torch.randn(6, 3, dtype=torch.float64)
    _in_microbatches(net, x, [2, 2, 2])
    whole(x)
    _compare(net, whole)
    assert net.norm.num_batches_tracked == 2


def test_stages_that_share_a_layer() -> None:
    """Each stage runs all microbatches before the next stage does."""
    module = nn.BatchNorm1d(3).double()
    whole = copy.deepcopy(module)
    x = torch.randn(6, 3, dtype=torch.float64)
    statistics = DeferredStatistics([module], 3)
    with statistics.recording():
        for stage, values in ((0, x), (2, x * 2 + 1)):
            for part in torch.split(values, 2):
                statistics.begin(stage)
                module(part)
    statistics.update()
    whole(x)
    whole(x * 2 + 1)
    _compare(module, whole)


@pytest.mark.parametrize("change", ["eval", "untracked"])
def test_layers_that_do_not_track_are_left_alone(change: str) -> None:
    module = nn.BatchNorm1d(3, track_running_stats=change != "untracked")
    if change == "eval":
        module.eval()
    before = copy.deepcopy(module.state_dict())
    statistics = DeferredStatistics([module], 2)
    with statistics.recording():
        assert "forward" not in vars(module)
        module(torch.randn(4, 3))
    statistics.update()
    torch.testing.assert_close(module.state_dict(), before)


def test_nothing_changes_when_a_microbatch_fails() -> None:
    module = nn.BatchNorm1d(3)
    before = copy.deepcopy(module.state_dict())
    statistics = DeferredStatistics([module], 2)
    with statistics.recording():
        module(torch.randn(4, 3))
        with pytest.raises(ValueError, match="Expected more than 1 value"):
            module(torch.randn(1, 3))
    torch.testing.assert_close(module.state_dict(), before)
    assert module.momentum == 0.1
    assert "forward" not in vars(module)


def test_a_forward_on_the_instance_is_called_and_put_back() -> None:
    module: Any = nn.BatchNorm1d(3)
    seen = []
    inner = module.forward

    def forward(x: Tensor) -> Tensor:
        seen.append(len(x))
        out: Tensor = inner(x)
        return out

    module.forward = forward
    _in_microbatches(module, torch.randn(4, 3), [2, 2])
    assert seen == [2, 2]
    assert module.forward is forward


def test_hooks_see_what_they_would_see() -> None:
    module = nn.BatchNorm1d(3).double()
    module.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    whole = copy.deepcopy(module)
    x = torch.randn(4, 3, dtype=torch.float64)
    _in_microbatches(module, x, [2, 2])
    whole(x)
    _compare(module, whole)


def test_buffers_of_a_half_precision_network() -> None:
    module: Any = nn.BatchNorm2d(3)
    with torch.autocast("cpu", torch.bfloat16):
        _in_microbatches(module, torch.randn(4, 3, 2, 2).bfloat16(), [2, 2])
    assert module.running_mean.dtype == torch.float32
    half: Any = nn.BatchNorm2d(3).bfloat16()
    _in_microbatches(half, torch.randn(4, 3, 2, 2).bfloat16(), [2, 2])
    assert half.running_mean.dtype == torch.bfloat16
    assert half.num_batches_tracked == 1


def test_a_count_that_the_layer_knows_better() -> None:
    """Synchronised layers normalise over several replicas; their count is not that of the input."""

    class Counting(nn.BatchNorm1d):
        last_count: Any = None

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            both = torch.cat([input, input + 1])
            self.last_count = torch.tensor(len(both))
            out: Tensor = super().forward(both)
            return out[: len(input)]

    module = Counting(3).double()
    whole: Any = nn.BatchNorm1d(3).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    _in_microbatches(module, x, [3, 2])
    whole(torch.cat([x, x + 1]))
    _compare(module, whole)
