"""Parameters that belong to no single stage: outside the network, or tied between stages."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cnnpar.data_parallel.replicate import GradientReducer
from lightning_cnnpar.mesh import Mesh, create_mesh
from tests.distributed.reducing import assert_bit_identical, assert_close
from tests.ranks import run_ranks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """One backward pass: who uses what, and whether it is synchronised."""

    synchronised: bool = True
    replicas_with_temperature: tuple[int, ...] = (0, 1, 2)
    ranks_with_tied: tuple[int, ...] = (0, 1, 2)
    zero: bool = False
    """Forget all gradients first, as an optimizer step does."""


PASSES = {
    "one": [Pass()],
    "accumulation": [Pass(synchronised=False), Pass(synchronised=False), Pass()],
    "several": [Pass(), Pass(), Pass()],
    "mixed": [Pass(), Pass(synchronised=False), Pass(), Pass()],
    "steps": [Pass(), Pass(zero=True), Pass(synchronised=False, zero=True), Pass(), Pass()],
    "used by one replica": [Pass(replicas_with_temperature=(0,)), Pass()],
    "used by one stage": [Pass(ranks_with_tied=(0,)), Pass(ranks_with_tied=(1,)), Pass()],
    "in turns": [Pass(ranks_with_tied=(1,)), Pass(synchronised=False, ranks_with_tied=(0,)), Pass(ranks_with_tied=())],
    "unused": [Pass(ranks_with_tied=(), replicas_with_temperature=())],
    "unused after use": [Pass(), Pass(ranks_with_tied=(), replicas_with_temperature=())],
}


def coefficient(kind: int, replica: int, stage: int, index: int) -> float:
    """The gradient of one parameter in one pass: every loss here is linear."""
    return 1.0 + 7 * kind + 3 * replica + 11 * stage * (kind != 1) + 0.5 * index


class _Begin(torch.autograd.Function):
    """Stands for the network: the point where every rank of a replica enters the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, reducer: GradientReducer) -> Tensor:
        ctx.reducer = reducer
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.reducer.begin_backward()
        ctx.reducer.ready_enabled(True)
        return grad, None


def worker(rank: int, world_size: int, pipeline_size: int, passes: list[Pass], middle_holds: bool) -> dict[str, Any]:
    mesh = create_mesh(world_size // pipeline_size, pipeline_size)
    held = middle_holds or mesh.pipeline_rank != 1
    stage, temperature = (nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2))
    tied = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64, device="cpu" if held else "meta"))
    reducer = GradientReducer(
        [("stage", stage)],
        mesh=mesh,
        world_parameters=[("temperature", temperature)],
        summed_parameters=[("tied", tied)],
    )
    parameters = {"stage": stage, "temperature": temperature, **({"tied": tied} if held else {})}
    for index, current in enumerate(passes):
        if current.zero:
            for parameter in parameters.values():
                parameter.grad = None
        loss = _loss(mesh, current, index, parameters)
        loss = _Begin.apply(loss, reducer)
        if current.synchronised:
            loss.backward()
        else:
            with reducer.no_sync():
                loss.backward()
    assert (reducer.statistics.num_rounds > 0) == (world_size > 1)
    return {name: parameter.grad for name, parameter in parameters.items()}


def _loss(mesh: Mesh, current: Pass, index: int, parameters: dict[str, nn.Parameter]) -> Tensor:
    used = {
        "stage": True,
        "temperature": mesh.data_rank in current.replicas_with_temperature,
        "tied": mesh.pipeline_rank in current.ranks_with_tied,
    }
    loss = torch.zeros((), dtype=torch.float64)
    for kind, (name, parameter) in enumerate(parameters.items()):
        if used[name]:
            loss = loss + coefficient(kind, mesh.data_rank, mesh.pipeline_rank, index) * parameter.sum()
    return loss if loss.requires_grad else loss.requires_grad_()


def expected(kind: int, size: tuple[int, int], stage: int, passes: list[Pass], holders: list[int]) -> float | None:
    """The gradient in one process: the sum over passes since the last step of the mean over replicas."""
    replicas, _ = size
    total, used = 0.0, False
    for index, current in enumerate(passes):
        if current.zero:
            total, used = 0.0, False
        for replica in range(replicas):
            stages = {0: [stage], 1: [stage], 2: [s for s in holders if s in current.ranks_with_tied]}[kind]
            if kind == 1 and replica not in current.replicas_with_temperature:
                stages = []
            used = used or bool(stages)
            total += sum(coefficient(kind, replica, s, index) for s in stages) / replicas
    return total if used else None


@pytest.mark.case("C20")
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize(
    ("size", "middle_holds"), [((1, 2), True), ((2, 2), True), ((1, 3), False), ((2, 1), True)], ids=str
)
def test_shared_gradients(size: tuple[int, int], middle_holds: bool, name: str) -> None:
    replicas, stages = size
    results = run_ranks(replicas * stages, worker, stages, PASSES[name], middle_holds)
    holders = [stage for stage in range(stages) if middle_holds or stage != 1]
    for rank, gradients in enumerate(results):
        for kind, parameter in enumerate(("stage", "temperature", "tied")):
            if parameter not in gradients:
                continue
            value = expected(kind, size, rank % stages, PASSES[name], holders)
            grad = gradients[parameter]
            assert (grad is None) == (value is None), parameter
            if grad is not None and value is not None:
                assert_close(parameter, grad, torch.full_like(grad, value))
    assert_bit_identical([{"temperature": gradients["temperature"]} for gradients in results])
    assert_bit_identical([{"tied": gradients["tied"]} for gradients in results if "tied" in gradients])
