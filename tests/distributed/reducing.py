"""Networks and backward passes that the tests of the reducer share."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cnnpar.data_parallel.comm_hook import ReductionStatistics
from lightning_cnnpar.data_parallel.replicate import GradientReducer
from lightning_cnnpar.mesh import create_mesh

Gradients = dict[str, Tensor | None]
Scenario = Callable[["Net", int, GradientReducer | None], None]
SMALL: dict[str, Any] = {"bucket_bytes": 400, "first_bucket_bytes": 100}  # several buckets, also for a tiny network


class Net(nn.Module):
    """A few layers with what a reducer meets: convolutions in channels_last, a branch, a scalar, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(2, 4, 3, dtype=torch.float64)
        self.body = nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 3, dtype=torch.float64), nn.ReLU())
        self.head = nn.Linear(4, 3, dtype=torch.float64)
        self.aux = nn.Linear(4, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float32))
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor, aux: bool = False) -> Tensor:
        features = self.body(self.stem(images)).mean((2, 3))
        outputs: Tensor = (self.aux if aux else self.head)(features) * self.scale
        return outputs


def images(seed: int, batch: int = 4) -> Tensor:
    """A batch of inputs, different for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, 6, 6, generator=generator, dtype=torch.float64).to(memory_format=torch.channels_last)


@contextlib.contextmanager
def blocked(reducer: GradientReducer | None) -> Iterator[None]:
    """`no_sync` of the reducer if there is one."""
    with contextlib.nullcontext() if reducer is None else reducer.no_sync():
        yield


def gradients(net: nn.Module) -> Gradients:
    """All gradients by name."""
    return {name: parameter.grad for name, parameter in net.named_parameters()}


def reduced(
    rank: int, world_size: int, scenario: Scenario, options: dict[str, Any]
) -> tuple[Gradients, ReductionStatistics]:
    """Run `scenario` on a replica."""
    warnings.simplefilter("error")
    net = Net()
    reducer = GradientReducer(list(net.named_parameters()), mesh=create_mesh(world_size, 1), **options)
    scenario(net, rank, reducer)
    reducer.remove()
    return gradients(net), reducer.statistics


def averaged(world_size: int, scenario: Scenario) -> Gradients:
    """What `reduced` has to give: the scenario without a reducer once for each replica, and the mean."""
    replicas = []
    for rank in range(world_size):
        net = Net()
        scenario(net, rank, None)
        replicas.append(gradients(net))
    return {name: _mean([replica[name] for replica in replicas]) for name in replicas[0]}


def _mean(values: list[Tensor | None]) -> Tensor | None:
    present = [value for value in values if value is not None]
    return sum(present[1:], present[0].clone()) / len(values) if present else None


def assert_same(actual: Gradients, expected: Gradients) -> None:
    """Compare gradient by gradient, `None` included."""
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        tolerance = 1e-10 if grad is None or grad.dtype == torch.float64 else 1e-6
        if grad is None:
            assert actual[name] is None, name
        else:
            assert_close(name, actual[name], grad, tolerance)


def assert_close(name: str, actual: Any, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Compare one tensor, and name it where it differs."""
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance, msg=lambda text: f"{name}: {text}")


def assert_bit_identical(ranks: list[Gradients]) -> None:
    """The copies of a parameter stay equal only if all ranks have the very same gradient."""
    for other in ranks[1:]:
        for name, grad in ranks[0].items():
            mine = other[name]
            assert (grad is None) == (mine is None), name
            assert grad is None or mine is None or torch.equal(grad, mine), name
