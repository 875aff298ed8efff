"""Split backward passes give autograd's gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_cnnpar.pipeline.weight_gradients import WeightGradients


class Twice(nn.Module):
    """One convolution, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.conv(self.conv(x).relu())
        return result


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(4, 6, 3, padding=1, stride=2, dilation=2),
    "no bias": lambda: nn.Conv2d(4, 4, 3, bias=False),
    "grouped": lambda: nn.Conv2d(4, 8, 3, groups=4),
    "same": lambda: nn.Conv2d(4, 4, 3, padding="same"),
    "reflect": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    "transposed": lambda: nn.ConvTranspose2d(4, 3, 3, stride=2, output_padding=1),
    "norms": lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.PReLU(), nn.GroupNorm(2, 4)),
    "linear": lambda: nn.Sequential(nn.Flatten(1), nn.LazyLinear(7), nn.ReLU(), nn.Linear(7, 3)),
    "three-dimensional linear": lambda: nn.Linear(8, 3),
    "twice": Twice,
    "weight norm": lambda: parametrizations.weight_norm(nn.Conv2d(4, 4, 3)),
    "frozen weight": lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1).requires_grad_(False)),
}


@pytest.mark.parametrize("needs_input", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_autograd(name: str, needs_input: bool) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name]().double()
    x = torch.randn(3, 4, 8, 8, dtype=torch.float64)
    network(x)  # lazy layers
    ours, theirs = x.clone().requires_grad_(needs_input), x.clone().requires_grad_(needs_input)
    network(theirs).square().mean().backward()
    expected = {key: p.grad for key, p in network.named_parameters()}
    network.zero_grad()
    weights = WeightGradients()
    with weights:
        loss = network(ours).square().mean()
    weights.defer(True)
    loss.backward()
    waiting = [key for key, p in network.named_parameters() if p.grad is None and expected[key] is not None]
    assert bool(waiting) == (name not in ("same", "weight norm"))
    weights.compute()
    for key, parameter in network.named_parameters():
        if expected[key] is None:
            assert parameter.grad is None
        else:
            assert torch.allclose(parameter.grad, expected[key], rtol=0, atol=1e-12), key  # type: ignore[arg-type]
    if needs_input:
        assert torch.allclose(ours.grad, theirs.grad, rtol=0, atol=1e-12)  # type: ignore[arg-type]


def test_hooks_of_a_parameter_run_once_however_often_it_is_used() -> None:
    network, seen = Twice(), []
    network.conv.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    weights = WeightGradients()
    with weights:
        loss = network(torch.randn(2, 4, 5, 5)).sum()
    weights.defer(True)
    loss.backward()
    assert seen == []
    weights.compute()
    assert seen == [True]


def test_undeferred_backward_is_whole() -> None:
    network = nn.Conv2d(2, 2, 1)
    with WeightGradients():
        loss = network(torch.randn(1, 2, 3, 3)).sum()
    loss.backward()
    assert network.weight.grad is not None
    assert network.bias is not None
    assert network.bias.grad is not None


def test_autocast_gives_the_same_types_and_numbers() -> None:
    torch.manual_seed(0)
    network, x = nn.Conv2d(4, 4, 3), torch.randn(2, 4, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = network(x)
    plain.float().square().mean().backward()
    assert network.weight.grad is not None
    expected = network.weight.grad.clone()
    network.zero_grad()
    weights = WeightGradients()
    with weights, torch.autocast("cpu", dtype=torch.bfloat16):
        split = network(x)
    assert split.dtype == plain.dtype
    assert torch.equal(split, plain)
    weights.defer(True)
    split.float().square().mean().backward()
    weights.compute()
    assert network.weight.grad.dtype == torch.float32
    assert torch.allclose(network.weight.grad, expected, rtol=1e-2, atol=1e-3)
