"""Gradients of replicas against the mean of the same passes in one process, gradient by gradient, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_cnnpar.data_parallel.replicate import GradientReducer
from lightning_cnnpar.mesh import create_mesh
from tests.distributed.reducing import (
    SMALL,
    Net,
    Scenario,
    assert_bit_identical,
    assert_same,
    averaged,
    blocked,
    images,
    reduced,
)
from tests.ranks import RankError, run_ranks

SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


@scenario
def one_pass(net: Net, rank: int, reducer: GradientReducer | None) -> None:
    net(images(rank)).square().mean().backward()


@scenario
def accumulation(net: Net, rank: int, reducer: GradientReducer | None) -> None:
    for i in range(3):
        with blocked(reducer):
            net(images(10 * i + rank)).square().mean().backward()
    net(images(rank)).square().mean().backward()


@scenario
def gradients_only_from_blocked_passes(net: Net, rank: int, reducer: GradientReducer | None) -> None:
    with blocked(reducer):
        net(images(rank), aux=True).square().mean().backward()
    net(images(rank)).square().mean().backward()


@scenario
def several_passes_before_a_step(net: Net, rank: int, reducer: GradientReducer | None) -> None:
    for i in range(3):
        net(images(10 * i + rank)).square().mean().backward()


@scenario
def blocked_between_synchronised_passes(net: Net, rank: int, reducer: GradientReducer | None) -> None:
    net(images(rank), aux=True).square().mean().backward()
    with blocked(reducer):
        net(images(10 + rank)).square().mean().backward()
    net(images(20 + rank)).square().mean().backward()


@scenario
def unused_on_one_replica(net: Net, rank: int, reducer: GradientReducer | None) -> None:
    for i in range(2):
        net(images(10 * i + rank), aux=rank == 0).square().mean().backward()


@scenario
def unused_in_turns(net: Net, rank: int, reducer: GradientReducer | None) -> None:
    for i in range(4):
        net(images(10 * i + rank), aux=(rank + i) % 3 == 0).square().mean().backward()


@scenario
def unfrozen_later(net: Net, rank: int, reducer: GradientReducer | None) -> None:
    net.body.requires_grad_(False)
    net.stem.requires_grad_(False)
    net(images(rank)).square().mean().backward()
    net.body.requires_grad_(True)
    net(images(10 + rank)).square().mean().backward()
    net.stem.requires_grad_(True)
    net(images(20 + rank)).square().mean().backward()


@scenario
def frozen_after_the_forward(net: Net, rank: int, reducer: GradientReducer | None) -> None:
    net(images(30 + rank)).square().mean().backward()
    loss = net(images(rank)).square().mean()
    net.head.requires_grad_(False)  # the graph still gives it a gradient
    net.stem.requires_grad_(False)
    loss.backward()


@scenario
def alternating_parts(net: Net, rank: int, reducer: GradientReducer | None) -> None:
    # As a GAN does: one part is frozen while the other one trains.
    parts = [net.body, net.head]
    for i in range(4):
        parts[i % 2].requires_grad_(False)
        net(images(10 * i + rank)).square().mean().backward()
        parts[i % 2].requires_grad_(True)


@scenario
def gradients_zeroed_in_place(net: Net, rank: int, reducer: GradientReducer | None) -> None:
    net(images(rank)).square().mean().backward()
    net.zero_grad(set_to_none=False)
    net(images(10 + rank)).square().mean().backward()


@scenario
def gradients_replaced_by_the_user(net: Net, rank: int, reducer: GradientReducer | None) -> None:
    net(images(rank)).square().mean().backward()
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone() * 2
    net.stem.weight.grad = None
    net(images(10 + rank)).square().mean().backward()


@scenario
def reentrant_checkpoints(net: Net, rank: int, reducer: GradientReducer | None) -> None:
    for i in range(2):
        batch = images(10 * i + rank).requires_grad_()
        features = checkpoint(lambda x: net.body(net.stem(x)), batch, use_reentrant=True)
        features = features + checkpoint(lambda x: net.body(net.stem(x)), batch * 2, use_reentrant=True)
        (net.head(features.mean((2, 3))) * net.scale).square().mean().backward()


@scenario
def a_pass_that_fails_in_between(net: Net, rank: int, reducer: GradientReducer | None) -> None:
    # No later pass takes the broken round for its own.
    with pytest.raises(ZeroDivisionError):
        net(_Failing.apply(images(rank).requires_grad_())).square().mean().backward()
    net.zero_grad()
    net(images(10 + rank)).square().mean().backward()


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ZeroDivisionError


@scenario
def many_orders(net: Net, rank: int, reducer: GradientReducer | None) -> None:
    for i in range(6):
        for parameter, wanted in zip(net.parameters(), f"{i * 37 % 512:09b}", strict=True):
            parameter.requires_grad_(wanted == "1" or parameter is net.scale)
        net(images(10 * i + rank), aux=i % 2 == 0).square().mean().backward()


@pytest.mark.case("C26")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", SCENARIOS)
def test_gradients_are_the_mean_over_the_replicas(name: str, world_size: int) -> None:
    results = run_ranks(world_size, reduced, SCENARIOS[name], SMALL)
    expected = averaged(world_size, SCENARIOS[name])
    for gradients, _ in results:
        assert_same(gradients, expected)
    assert_bit_identical([gradients for gradients, _ in results])


def test_buckets_start_during_the_backward_pass() -> None:
    for _, statistics in run_ranks(2, reduced, several_passes_before_a_step, SMALL):
        assert statistics.num_rounds == 3
        # The unused head is in the way once: the second layout has it at the end, and leaves it out.
        assert statistics.num_reductions - statistics.num_overlapped == 5
        assert statistics.num_overlapped == 2 * 4
        assert statistics.num_late == 0
        assert 3 * 1_500 < statistics.num_bytes < 3 * 2_500


def test_memory_format_of_gradients_stays() -> None:
    for gradients, _ in run_ranks(2, reduced, unused_on_one_replica, {}):
        weight = gradients["stem.weight"]
        assert weight is not None
        assert weight.is_contiguous(memory_format=torch.channels_last)


# --- training -----------------------------------------------------------------------------------------------------


def trained(rank: int, world_size: int, steps: int) -> dict[str, Tensor]:
    net = Net()
    reducer = None
    if world_size > 1:
        reducer = GradientReducer(list(net.named_parameters()), mesh=create_mesh(world_size, 1), **SMALL)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        whole = [images(step, 6), images(100 + step, 6)]
        own = [batch.tensor_split(world_size)[rank] for batch in whole]
        with blocked(reducer):
            net(own[0]).square().mean().backward()
        net(own[1]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in net.state_dict().items()}


@pytest.mark.case("C26")
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_equals_one_process_with_the_whole_batch(world_size: int) -> None:
    expected = trained(0, 1, 5)
    for weights in run_ranks(world_size, trained, 5):
        for name, value in expected.items():
            tolerance = 1e-10 if value.dtype == torch.float64 else 1e-6
            torch.testing.assert_close(weights[name], value, atol=tolerance, rtol=tolerance)


# --- errors -------------------------------------------------------------------------------------------------------


def freeze_on_one_replica(net: Net, rank: int, reducer: GradientReducer | None) -> None:
    net.head.requires_grad_(rank == 0)
    net(images(rank)).square().mean().backward()


def raise_on_one_replica(net: Net, rank: int, reducer: GradientReducer | None) -> None:
    batch = images(rank).requires_grad_()
    net(_Failing.apply(batch) if rank == 1 else batch).square().mean().backward()


def test_replicas_that_freeze_different_parameters_are_told_so() -> None:
    with pytest.raises(RankError, match=r"True on some replicas and False on others for 'head\.weight'"):
        run_ranks(2, reduced, freeze_on_one_replica, SMALL)


def test_an_error_in_a_backward_pass_ends_the_other_ranks() -> None:
    with pytest.raises(RankError, match=r"rank 1: (?s:.)*ZeroDivisionError") as caught:
        run_ranks(2, reduced, raise_on_one_replica, SMALL, timeout=20)
    assert caught.value.rank == 1


def test_a_sum_of_other_dtypes() -> None:
    results = run_ranks(2, mixed_dtypes)
    for result in results:
        for name, dtype in (("half", torch.float16), ("brain", torch.bfloat16), ("complex", torch.complex128)):
            assert result[name].dtype == dtype
            torch.testing.assert_close(result[name], torch.full((3,), 1.5, dtype=dtype))
        # The sum of both replicas is more than float16 can hold, the mean is not.
        assert result["large"].tolist() == [60000.0]


def mixed_dtypes(rank: int, world_size: int) -> dict[str, Tensor]:
    parameters = {
        "half": nn.Parameter(torch.ones(3, dtype=torch.float16)),
        "brain": nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        "complex": nn.Parameter(torch.ones(3, dtype=torch.complex128)),
    }
    large = nn.Parameter(torch.ones(1, dtype=torch.float16))
    GradientReducer([*parameters.items(), ("large", large)], mesh=create_mesh(world_size, 1))
    loss: Tensor = sum(((rank + 1) * parameter.sum()).real.float() for parameter in parameters.values())  # type: ignore[assignment]
    torch.autograd.backward(loss + (60000.0 * large).sum())
    return {name: parameter.grad for name, parameter in {**parameters, "large": large}.items()}  # type: ignore[misc]
