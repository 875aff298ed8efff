"""What the network call tells the averaging of gradients, and what users do with its outputs."""

import weakref
from typing import Any, ClassVar

import torch

from lightning_cnnpar.mesh import create_mesh
from tests.ranks import run_ranks
from tests.unit.pipeline.graphs import GraphNet, Step, chain, conv, head, only, skips
from tests.unit.pipeline.pairs import Pair, images, mean_square


class _Log:
    """Stands for the reducer: notes what it is told, and when parameters get gradients."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def begin_backward(self, passes: int) -> None:
        self.events.append("begin")

    def ready_enabled(self, enabled: bool) -> None:
        self.events.append("ready" if enabled else "not ready")

    def take(self) -> list[str]:
        events, self.events = self.events, []
        return events


def _log_events(rank: int, world_size: int) -> dict[str, list[str]]:
    log = _Log()
    pair = Pair(chain(), [0, 2], [0, 1], 3, gradient_sync=log)
    name = "a.0.bias" if rank == 0 else "c.0.bias"
    parameter: Any = dict(pair.net.named_parameters())[name]
    parameter.register_post_accumulate_grad_hook(lambda _: log.events.append("gradient"))
    seen = {}

    pair.network((images(),), {}, label="step").sum().backward()
    seen["one call"] = log.take()

    one, two = (pair.network((images(),), {}, label="step") for _ in range(2))
    (one.sum() + two.sum()).backward()
    seen["two calls"] = log.take()
    del one, two

    forgotten = pair.network((images(),), {}, label="step")
    pair.network.reset()
    pair.network((images(),), {}, label="step").sum().backward()
    seen["after a forgotten call"] = log.take()
    del forgotten

    pair.network((images(),), {}, label="step")
    pair.network((images(),), {}, label="step").sum().backward()
    seen["after a call whose output is gone"] = log.take()

    with torch.no_grad():
        pair.network((images(),), {}, label="step")
    x = images().requires_grad_()
    torch.autograd.grad(pair.network((x,), {}, label="step").sum(), x)
    seen["inputs only"] = log.take()
    return seen


def test_the_last_backward_is_announced() -> None:
    single = ["begin", "not ready", "gradient", "gradient", "ready", "gradient"]
    for seen in run_ranks(2, _log_events):
        assert seen == {
            "one call": single,
            "two calls": ["begin", "not ready", *["gradient"] * 3, *single],
            "after a forgotten call": single,
            "after a call whose output is gone": single,
            "inputs only": [],
        }


def _change_outputs(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    mesh = create_mesh(1, world_size)
    for microbatches in (1, 3):
        pair = Pair(skips(), [0, 3], [0, 1], microbatches, mesh=mesh)
        for _ in range(2):
            out, expected = pair.call(images())
            for outputs in (out, expected):
                outputs["out"].mul_(2).clamp_(-1, 1)
                outputs["aux"][:, 0] += 1
            torch.autograd.backward([mean_square(out), mean_square(expected)])
            pair.check()


def test_outputs_may_be_changed_in_place() -> None:
    run_ranks(2, _change_outputs)


def _autocast(rank: int, world_size: int) -> None:
    pair = Pair(chain(norm=True), [0, 2], [0, 1], 1)
    x = images()
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = pair.network((x,), {}, label="step"), pair.whole(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    torch.autograd.backward([out.float().square().sum(), expected.float().square().sum()])
    pair.check()
    split = Pair(chain(), [0, 2], [0, 1], 4, mesh=pair.mesh)
    with torch.autocast("cpu", torch.bfloat16):
        out = split.network((x,), {}, label="step")
        parts = [split.whole(part) for part in torch.split(x, 2)]
    assert torch.equal(out, torch.cat(parts))
    torch.autograd.backward(out.float().square().sum())


def test_autocast_is_that_of_the_caller() -> None:
    run_ranks(2, _autocast)


class _Watched(torch.autograd.Function):
    """Does nothing, and knows how many graphs that it is part of are alive."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    class _Token:
        pass

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.token = _Watched._Token()
        _Watched.alive.add(ctx.token)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _keep_the_output(rank: int, world_size: int) -> tuple[int, int]:
    def watch(x: torch.Tensor) -> torch.Tensor:
        watched: torch.Tensor = _Watched.apply(x)
        return watched

    steps: list[Step] = [
        ("a", conv(3, 4), ("in0",)),
        ("b", watch, ("a",)),
        ("c", watch, ("b",)),
        ("d", head(4), ("c",)),
    ]
    pair = Pair(GraphNet(steps, ["d"], only), [0, 2], [0, 1], 3)
    _Watched.alive.clear()
    out = pair.network((images(),), {}, label="step")
    kept = len(_Watched.alive)
    torch.autograd.backward(out.sum(), retain_graph=False)
    assert out.grad_fn is not None
    with torch.no_grad():
        pair.network((images(),), {}, label="step")
    return kept, len(_Watched.alive)


def test_graphs_are_freed_by_the_backward() -> None:
    """Also while the user keeps the output; without gradients nothing is kept at all."""
    assert run_ranks(2, _keep_the_output) == [(3, 0), (3, 0)]


def _use_many_outputs(rank: int, world_size: int) -> float:
    """Large outputs, which travel by microbatch; the graph is gone after the backward."""
    torch.set_default_dtype(torch.float64)
    pair = Pair(skips(), [0, 2, 5], [0, 1, 2], 3)
    x = images(4, 64)
    for _ in range(2):
        pair.step(x)
    return float(pair.net.get_submodule("out").weight.abs().sum())  # type: ignore[operator]


def test_large_outputs() -> None:
    run_ranks(3, _use_many_outputs)
