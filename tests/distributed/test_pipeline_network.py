"""The collective call against the network in one piece: outputs, every gradient, every buffer, in float64."""

import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cnnpar.mesh import create_mesh
from tests.ranks import run_ranks
from tests.unit.pipeline.graphs import GraphNet, Step, chain, conv, head, only, skips
from tests.unit.pipeline.pairs import Pair, images, mean_square

Layout = tuple[list[int], list[int]]
LAYOUTS: dict[str, tuple[Callable[[], GraphNet], Layout]] = {
    "chain on 2": (chain, ([0, 2], [0, 1])),
    "chain on 3": (chain, ([0, 1, 3], [0, 1, 2])),
    "chain, virtual stages": (chain, ([0, 1, 3, 4], [0, 1, 0, 1])),
    "chain, neighbours on one rank": (chain, ([0, 1, 3], [0, 0, 1])),
    "chain, backwards": (chain, ([0, 2], [1, 0])),
    "skips on 2": (skips, ([0, 3], [0, 1])),
    "skips on 3": (skips, ([0, 2, 5], [0, 1, 2])),
    "skips on 4": (skips, ([0, 2, 3, 5], [0, 1, 2, 3])),
    "skips, virtual stages": (skips, ([0, 2, 4, 6], [0, 1, 0, 1])),
    "skips, there and back": (skips, ([0, 2, 3, 6], [0, 1, 1, 0])),
}


BATCHES = [(8, 8), (8, 8), (5, 8), (8, 12), (2, 8), (1, 8)]


def _train_on_changing_batches(rank: int, world_size: int, microbatches: int) -> None:
    torch.set_default_dtype(torch.float64)
    mesh = create_mesh(1, world_size)
    for name, (build, (starts, ranks)) in LAYOUTS.items():
        if max(ranks) + 1 == world_size:
            pair = Pair(build(), starts, ranks, microbatches, mesh=mesh, name=name)
            for batch, size in BATCHES:
                pair.step(images(batch, size))


@pytest.mark.case("C03")
@pytest.mark.case("C04")
@pytest.mark.case("C09")
@pytest.mark.case("C13")
@pytest.mark.case("C60")
@pytest.mark.parametrize(("world_size", "microbatches"), [(2, 3), (3, 3), (4, 4), (2, 1)])
def test_training_on_changing_batches(world_size: int, microbatches: int) -> None:
    """Short batches, one sample, other image sizes; 8 in 3 gives 3, 3, 2."""
    run_ranks(world_size, _train_on_changing_batches, microbatches)


def _change_modes(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    pair = Pair(skips(), [0, 3], [0, 1], 3)
    pair.step(images())
    pair.train(False)
    with torch.no_grad():
        out, _ = pair.call(images(7))
        assert not out["out"].requires_grad
    with torch.inference_mode():
        out, _ = pair.call(images(2, 12))
        assert out["out"].is_inference()
    pair.step(images(4))
    pair.train(True)
    pair.zero_grad()
    pair.step(images())


@pytest.mark.case("C16")
def test_train_eval_train() -> None:
    run_ranks(2, _change_modes)


def _differentiate_inputs(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    steps: list[Step] = [
        ("a", conv(3, 4), ("in0",)),
        ("b", conv(4, 4), ("a",)),
        ("scaled", lambda b, x, s: b * s + x.mean(1, keepdim=True), ("b", "in0", "in1")),
        ("c", head(4), ("scaled",)),
    ]
    pair = Pair(GraphNet(steps, ["c"], only), [0, 2], [0, 1], 3)
    for size in (8, 2):
        x, scale = images(size).requires_grad_(), torch.tensor(1.5, requires_grad=True)
        out, expected = pair.call(x, scale)
        gradients = torch.autograd.grad(out.square().sum(), [x, scale], retain_graph=True)
        pair.compare("inputs", gradients, torch.autograd.grad(expected.square().sum(), [x, scale], retain_graph=True))
        # Asking for gradients of inputs leaves those of parameters alone.
        assert all(parameter.grad is None for parameter in pair.net.parameters())
        out.square().sum().backward()
        own, x.grad, scale.grad = (x.grad, scale.grad), None, None
        expected.square().sum().backward()
        pair.compare("inputs", own, (x.grad, scale.grad))
        pair.check()
        pair.zero_grad()


def test_gradients_of_inputs_that_several_stages_read() -> None:
    run_ranks(2, _differentiate_inputs)


EVERYTHING = ["a", "aux", "b", "c", "d", "out"]


def _freeze(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    mesh = create_mesh(1, world_size)
    for frozen in (["a"], ["a", "aux"], ["a", "b"], ["d", "out"], EVERYTHING):
        pair = Pair(skips(), [0, 2, 5], [0, 1, 2], 2, mesh=mesh)
        for net in (pair.net, pair.whole):
            for name in frozen:
                net.get_submodule(name).requires_grad_(False)
        if frozen == EVERYTHING:
            pair.call(images())
        else:
            pair.step(images())
        # Unfreezing in the middle of a run changes what crosses the wire.
        pair.net.requires_grad_()
        pair.whole.requires_grad_()
        pair.step(images())


def test_frozen_stages() -> None:
    run_ranks(3, _freeze)


def _loss_of(output: str, outputs: Any) -> torch.Tensor:
    return mean_square(outputs[output])


def _use_one_output(rank: int, world_size: int) -> None:
    """What no path leads from to the loss has no gradient: `None`, not zeros, on every rank."""
    torch.set_default_dtype(torch.float64)
    mesh = create_mesh(1, world_size)
    for output in ("out", "aux"):
        pair = Pair(skips(), [0, 2, 5], [0, 1, 2], 3, mesh=mesh)
        pair.step(images(), loss=functools.partial(_loss_of, output))
        pair.zero_grad()
        pair.step(images())


@pytest.mark.case("C73")
def test_outputs_that_the_loss_does_not_use() -> None:
    run_ranks(3, _use_one_output)


def _call_twice(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    pair = Pair(skips(), [0, 3], [0, 1], 2)
    for _ in range(2):
        (one, one_expected), (two, two_expected) = pair.call(images()), pair.call(images(4))
        product = mean_square(one) * mean_square(two)
        torch.autograd.backward([product, mean_square(one_expected) * mean_square(two_expected)])
        pair.check()
    # One that is never differentiated.
    pair.call(images())
    pair.step(images())


def test_siamese() -> None:
    run_ranks(2, _call_twice)


def _retain(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    pair = Pair(skips(), [0, 2, 4, 6], [0, 1, 0, 1], 3)
    out, expected = pair.call(images())
    for outputs in (out, expected):
        torch.autograd.backward(mean_square(outputs), retain_graph=True)
        outputs["aux"].sum().backward(retain_graph=True)
        outputs["out"].sum().backward()
    pair.check()
    with pytest.raises(
        RuntimeError, match=r"second time through network 'model' in training_step, batch 0.*retain_graph"
    ):
        torch.autograd.backward(mean_square(out))


def test_retain_graph() -> None:
    run_ranks(2, _retain)


def _differentiate_twice(rank: int, world_size: int) -> str:
    pair = Pair(chain().double(), [0, 2], [0, 1], 2)
    x = images().double().requires_grad_()
    out, _ = pair.call(x)
    with pytest.raises(RuntimeError) as error:
        torch.autograd.grad(out.sum(), x, create_graph=True)
    return str(error.value)


def test_double_backward_is_refused_by_name() -> None:
    for message in run_ranks(2, _differentiate_twice):
        assert "create_graph=True" in message
        assert "'model'" in message


def _return_odd_outputs(rank: int, world_size: int) -> list[str]:
    """A loss made inside of the network, and a result that has no entry per sample."""
    torch.set_default_dtype(torch.float64)
    steps: list[Step] = [
        ("a", conv(3, 4), ("in0",)),
        ("drop", nn.Dropout(0.5), ("a",)),
        ("table", lambda a: a.mean((0, 2, 3)), ("drop",)),
        ("b", conv(4, 4), ("drop",)),
        ("loss", lambda b: b.square().mean(), ("b",)),
    ]
    pair = Pair(GraphNet(steps, ["loss", "table"]), [0, 3], [0, 1], 4)
    pair.net.drop.p = pair.whole.drop.p = 0.0  # type: ignore[union-attr]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            pair.step(images())
    return [str(warning.message) for warning in caught]


def test_outputs_without_an_entry_per_sample() -> None:
    told, nothing = run_ranks(2, _return_odd_outputs)
    assert len(told) == 1
    assert "runs each batch whole" in told[0]
    assert "num_microbatches=1" in told[0]
    assert nothing == []


def _keep_layout(rank: int, world_size: int) -> list[Any]:
    """What stage 1 receives is channels_last, and so is the output on every rank."""
    torch.set_default_dtype(torch.float64)
    seen = []

    def look(b: torch.Tensor) -> torch.Tensor:
        seen.append(b.is_contiguous(memory_format=torch.channels_last) and not b.is_contiguous())
        return b * 2

    steps: list[Step] = [("a", conv(3, 4), ("in0",)), ("b", look, ("a",)), ("c", conv(4, 4), ("b",))]
    net = GraphNet(steps, ["c"], only).to(memory_format=torch.channels_last)
    pair = Pair(net, [0, 1], [0, 1], 3)
    seen.clear()
    x = images().to(memory_format=torch.channels_last)
    out = pair.network((x,), {}, label="step")
    own = list(seen)
    out.square().mean().backward()
    pair.whole(x).square().mean().backward()
    pair.check()
    return [own, out.is_contiguous(memory_format=torch.channels_last)]


@pytest.mark.case("C59")
def test_channels_last_is_kept() -> None:
    assert run_ranks(2, _keep_layout) == [[[], True], [[True, True, True], True]]


def _send_odd_tensors(rank: int, world_size: int) -> None:
    """Booleans, integers, empty ones, scalars, several readers of one value."""
    torch.set_default_dtype(torch.float64)
    steps: list[Step] = [
        ("a", conv(3, 4), ("in0",)),
        ("mask", lambda a: a > 0, ("a",)),
        ("arg", lambda a: a.flatten(1).argmax(1).to(torch.int16), ("a",)),
        ("empty", lambda a: a[:, :0], ("a",)),
        ("scale", lambda a: a.detach().abs().max() * 0 + 2, ("a",)),
        ("half", lambda a: a.to(torch.bfloat16).transpose(1, 2), ("a",)),
        ("b", lambda a, mask, empty: torch.cat([a * mask, empty], 1), ("a", "mask", "empty")),
        ("c", conv(4, 4), ("b",)),
        (
            "d",
            lambda c, a, i, s, h: (c + a) * s + i.view(-1, 1, 1, 1) + h.transpose(1, 2),
            ("c", "a", "arg", "scale", "half"),
        ),
    ]
    pair = Pair(GraphNet(steps, ["d", "arg", "mask"]), [0, 6, 8], [0, 1, 2], 3)
    out, expected = pair.call(images())
    out[0].square().mean().backward()
    expected[0].square().mean().backward()
    pair.check()


def test_tensors_of_any_type() -> None:
    run_ranks(3, _send_odd_tensors)


def _random_network(draw: random.Random) -> GraphNet:
    """Up to ten layers, each on one or two earlier results or inputs, and some of the results as outputs."""
    names, steps = ["in0", "in1"], list[Step]()
    for i in range(draw.randint(4, 10)):
        if draw.random() < 0.6:
            steps.append((f"s{i}", nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()), (draw.choice(names),)))
        else:
            steps.append((f"s{i}", torch.mul if draw.random() < 0.5 else torch.add, tuple(draw.choices(names, k=2))))
        names.append(f"s{i}")
    made = names[2:]
    return GraphNet(steps, sorted({made[-1], *draw.sample(made, k=draw.randint(0, 2))}))


def _train_random_networks(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    mesh = create_mesh(1, world_size)
    for seed in range(25):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        net = _random_network(draw)
        starts = [0, *sorted(draw.sample(range(1, len(net.steps)), k=draw.randint(1, 3)))]
        ranks = [draw.randrange(world_size) for _ in starts]
        pair = Pair(net, starts, ranks, draw.randint(1, 4), mesh=mesh, name=f"seed {seed}")
        for _ in range(2):
            x = images(draw.randint(2, 6), 4)
            out, expected = pair.call(x.requires_grad_(draw.random() < 0.5), torch.randn_like(x))
            used = [i for i in range(len(out)) if draw.random() < 0.7] or [0]
            if not out[used[0]].requires_grad:
                continue
            weights = [torch.randn_like(out[i]) for i in used]
            for outputs in (out, expected):
                loss = torch.stack([(outputs[i] * w).sum() for i, w in zip(used, weights, strict=True)]).sum()
                torch.autograd.backward(loss)
            pair.check()


def test_random_networks_cut_at_random() -> None:
    run_ranks(3, _train_random_networks)


def _leave_a_rank_out(rank: int, world_size: int) -> None:
    """All stages of this network are on one rank: the other one takes part all the same."""
    torch.set_default_dtype(torch.float64)
    mesh = create_mesh(1, world_size)
    for owner in (0, 1):
        pair = Pair(skips(), [0, 3], [owner, owner], 3, mesh=mesh)
        x = images().requires_grad_()
        out, expected = pair.call(x)
        gradients = [torch.autograd.grad(mean_square(outputs), x, retain_graph=True) for outputs in (out, expected)]
        pair.compare("inputs", *gradients)
        torch.autograd.backward([mean_square(out), mean_square(expected)])
        pair.check()
        with torch.no_grad():
            pair.call(images(0))


def test_ranks_without_a_stage_and_batches_without_a_sample() -> None:
    run_ranks(2, _leave_a_rank_out)


def _compare_with_library(rank: int, world_size: int) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.set_default_dtype(torch.float64)
    pair = Pair(chain(), [0, 2], [0, 1], 4)
    x, target = images(), torch.randn(8, 5)
    loss = nn.MSELoss()
    torch.autograd.backward(loss(pair.network((x,), {}, label="step"), target))
    layers = [pair.whole.get_submodule(name) for name in ("a", "b", "drop", "c", "d")]
    parts = [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])]
    between = parts[0](x[:2]).detach().requires_grad_()
    examples = [(x[:2],), (between,), (parts[1](between).detach().requires_grad_(),)]
    stage = PipelineStage(
        parts[rank], rank, 2, torch.device("cpu"), input_args=examples[rank], output_args=examples[rank + 1]
    )
    ScheduleGPipe(stage, 4, loss_fn=loss).step(*(() if rank else (x,)), target=target if rank else None)
    pair.check()


def test_gradients_are_those_of_the_library() -> None:
    """`torch.distributed.pipelining` with the same cut and microbatches."""
    run_ranks(2, _compare_with_library)


def _narrow(rank: int, world_size: int) -> tuple[float, float]:
    pair = Pair(chain(), [0, 2], [0, 1], 2, wire_dtype=torch.bfloat16)
    x = images()
    out, expected = pair.network((x,), {}, label="step"), pair.whole(x)
    out.square().sum().backward()
    expected.square().sum().backward()
    grads = {name: parameter.grad for name, parameter in pair.whole.named_parameters()}
    worst = max(
        float((p.grad - grads[name]).norm() / grads[name].norm())  # type: ignore[operator, union-attr]
        for name, p in pair.net.named_parameters()
        if p.grad is not None
    )
    return float((out - expected).abs().max()), worst


def test_narrow_wire() -> None:
    for forward, backward in run_ranks(2, _narrow):
        assert 1e-7 < forward < 1e-2
        assert 1e-7 < backward < 3e-2
