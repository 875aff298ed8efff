"""Backward passes inside a backward pass, as the pipeline runs them: one for each microbatch of a network call."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cnnpar.data_parallel.replicate import GradientReducer
from tests.distributed.reducing import (
    SMALL,
    Net,
    Scenario,
    assert_bit_identical,
    assert_same,
    averaged,
    images,
    reduced,
)
from tests.ranks import run_ranks


class _Call(torch.autograd.Function):
    """The network call: its backward runs one backward pass for each microbatch."""

    @staticmethod
    def forward(ctx: Any, batch: Tensor, net: Net, reducer: GradientReducer | None, final: int) -> Tensor:
        ctx.reducer, ctx.final = reducer, final
        with torch.enable_grad():
            ctx.inputs = [part.detach().requires_grad_() for part in batch.chunk(len(batch))]
            ctx.outputs = [net.body(net.stem(part)).mean((2, 3)) for part in ctx.inputs]
        return torch.cat([output.detach() for output in ctx.outputs])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.reducer is not None:
            ctx.reducer.begin_backward()
        for i, (output, part) in enumerate(zip(ctx.outputs, grad.chunk(len(grad)), strict=True)):
            if ctx.reducer is not None:
                ctx.reducer.ready_enabled(i >= ctx.final)
            torch.autograd.backward(output, part)
        return torch.cat([part.grad for part in ctx.inputs]), None, None, None


def call(net: Net, batch: Tensor, reducer: GradientReducer | None, final: int = 3) -> Tensor:
    outputs: Tensor = _Call.apply(batch.requires_grad_(), net, reducer, final)
    return outputs


def one_call(net: Net, rank: int, reducer: GradientReducer | None, passes: int = 3) -> None:
    for i in range(passes):
        (net.head(call(net, images(10 * i + rank), reducer)) * net.scale).square().mean().backward()


def a_network_between_other_layers(net: Net, rank: int, reducer: GradientReducer | None) -> None:
    for i in range(3):
        batch = images(10 * i + rank) * net.scale
        net.head(call(net, batch, reducer)).square().mean().backward()


def two_calls(net: Net, rank: int, reducer: GradientReducer | None) -> None:
    # Only the backward of the first call, which comes last, knows that its gradients are final.
    for i in range(3):
        first = call(net, images(10 * i + rank), reducer)
        second = call(net, images(100 + 10 * i + rank), reducer, final=4)
        net.head(first - second).square().mean().backward()


def gradients_that_come_late(net: Net, rank: int, reducer: GradientReducer | None) -> None:
    # A pipeline that calls gradients final too early on one replica costs time, not correctness.
    for i in range(3):
        first = call(net, images(10 * i + rank), reducer)
        second = call(net, images(100 + 10 * i + rank), reducer, final=2 if rank == 0 else 4)
        penalty = sum(parameter.square().sum() for parameter in net.body.parameters())
        (net.head(first - second).square().mean() + penalty).backward()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "scenario",
    [one_call, a_network_between_other_layers, two_calls, gradients_that_come_late],
    ids=lambda f: f.__name__,
)
def test_gradients_are_the_mean_over_the_replicas(scenario: Scenario, world_size: int) -> None:
    results = run_ranks(world_size, reduced, scenario, SMALL)
    expected = averaged(world_size, scenario)
    for gradients, statistics in results:
        assert_same(gradients, expected)
        assert statistics.num_rounds == 3  # once for each outermost pass
    assert (results[0][1].num_late > 0) == (scenario is gradients_that_come_late)
    assert_bit_identical([gradients for gradients, _ in results])


def test_buckets_start_with_the_last_microbatch() -> None:
    for _, statistics in run_ranks(2, reduced, functools.partial(one_call, passes=2), SMALL):
        assert statistics.num_overlapped > 0
        assert statistics.num_late == 0
