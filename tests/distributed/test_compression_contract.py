"""What every compressor promises, on 1 to 4 replicas."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cnnpar.compression import (
    CompressionEngine,
    CompressionPolicy,
    Compressor,
    Int8,
    Part,
    PowerSGD,
    TopK,
    from_name,
)
from lightning_cnnpar.compression.topk import largest
from tests import nets
from tests.fitting import Case, Layout, Record, loaders, make_strategy, make_trainer
from tests.ranks import RankError, run_ranks

CASE = Case(module=nets.Classifier, train=nets.images40)
NAMES = ("bf16", "int8", "int4", "int2", "onebit", "topk", "topk with a ramp", "topk with momentum", "powersgd")
MOMENTUM = 0.9
SHAPES = {
    "conv": (37, 7, 3, 3),
    "tall": (2053, 3),
    "wide": (3, 2053),
    "bias": (37,),
    "tiny": (5, 5),
    "one": (1, 2500),
    "big": (300, 301),
}
# What may be outstanding after many steps of a constant gradient, in norms of the mean gradient. An encoding that leaves
# out the share r of a vector's norm leaves r / (1 - r) of it outstanding at most, on each worker and on the server.
OUTSTANDING = {
    "bf16": 0.02,
    "int8": 0.05,
    "int4": 0.5,
    "int2": 3.5,
    "onebit": 6.0,
    "topk": 12.0,
    "powersgd": 55.0,
    "topk with a ramp": 25.0,
}
STEPS = 60


def compressor(name: str) -> Compressor:
    if name.startswith("topk"):
        variants = {"topk with a ramp": {"ramp_steps": STEPS // 2, "ratio": 0.02, "warmup_steps": 5}}
        variants["topk with momentum"] = {"momentum": MOMENTUM}
        return TopK(**{"ratio": 0.05, **variants.get(name, {})})
    return PowerSGD(rank=4) if name == "powersgd" else from_name(name)


def gradients(rank: int, kind: str = "normal") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    if kind == "zeros":
        made = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    if kind == "denormal":
        made = {name: value * 1e-41 for name, value in made.items()}
    if kind == "tiny":
        made = {name: value * 1e-12 for name, value in made.items()}
    if kind == "outlier":
        made["big"][7, 7] = 1e30
    return made


def parts(values: dict[str, Tensor]) -> list[Part]:
    return [Part(name, value.view(-1), tuple(value.shape)) for name, value in values.items()]


def step(engine: CompressionEngine, values: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """The sums; in two buckets."""
    shares = {name: value / size for name, value in values.items()}
    every = parts(shares)
    pending = [engine.start(0, every[:3]), engine.start(1, every[3:])]
    for one in pending:
        one.wait()
    engine.finish_step()
    return shares


def mean_of(size: int, kind: str = "normal") -> dict[str, Tensor]:
    everywhere = [gradients(rank, kind) for rank in range(size)]
    return {name: torch.stack([one[name] for one in everywhere]).double().mean(0) for name in SHAPES}


def _contract(rank: int, size: int, names: tuple[str, ...]) -> dict[str, Any]:
    group: Any = dist.new_group(backend="gloo")
    control: Any = dist.new_group(backend="gloo")
    found = {}
    for name in names:
        engine = CompressionEngine(
            CompressionPolicy.of(compressor(name)), group=group, device=torch.device("cpu"), loss_scale=lambda: 8.0
        )
        found[name] = _one(engine, control, rank, size, compressor(name))
        engine.close()
    return found


def _one(engine: CompressionEngine, control: Any, rank: int, size: int, codec: Compressor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    scale, mean, momentum = 8.0, mean_of(size), engine.momentum
    applied = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for _ in range(STEPS):
        sums = step(engine, {name: value * scale for name, value in gradients(rank).items()}, size)
        for name, value in sums.items():
            applied[name] += value.double() / scale
    found["first"] = {name: value.clone() for name, value in sums.items()}
    found["outstanding"] = {n: float((STEPS * mean[n] - applied[n]).norm() / mean[n].norm()) for n in SHAPES}
    # Of a constant gradient and its velocities.
    total = sum((1 - momentum**step) / (1 - momentum) for step in range(1, STEPS + 1))
    found["exact"] = {name: float((applied[name] / total - mean[name]).abs().max()) for name in ("bias", "tiny")}
    # What is not applied yet is kept, to rounding: workers and servers of all ranks together.
    state = engine.gather_state(control)
    if rank == 0:
        kept = {
            name: rows.double().sum(0).view(SHAPES[name]) for name, rows in state["residuals"].items() if name in SHAPES
        }
        found["mass"] = {name: float((STEPS * mean[name] - applied[name] - kept[name]).abs().max()) for name in kept}
    found["nan"] = _not_finite(engine, control, rank, size)
    found["resumed"] = _resumed(engine, control, rank, size, codec)
    found["kinds"] = {}
    for kind in ("zeros", "denormal", "tiny", "outlier"):
        fresh = CompressionEngine(CompressionPolicy.of(codec), group=engine._site.group, device=torch.device("cpu"))
        sums = step(fresh, gradients(rank, kind), size)
        finite = all(bool(value.isfinite().all()) for value in sums.values())
        found["kinds"][kind] = (
            finite,
            {name: value.double() - mean_of(size, kind)[name] for name, value in sums.items()},
        )
        fresh.close()
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        fresh = CompressionEngine(CompressionPolicy.of(codec), group=engine._site.group, device=torch.device("cpu"))
        sums = step(fresh, {name: value.to(dtype) for name, value in gradients(rank).items()}, size)
        assert all(value.dtype == dtype for value in sums.values())
        found[f"{dtype}"] = {name: value.clone() for name, value in sums.items()}
        fresh.close()
    return found


def _not_finite(engine: CompressionEngine, control: Any, rank: int, size: int) -> dict[str, Any]:
    before = engine.gather_state(control)["residuals"]
    spoiled = gradients(rank)
    if rank == size - 1:
        spoiled["big"][3, 2] = float("inf")
    sums = step(engine, spoiled, size)
    after = engine.gather_state(control)["residuals"]
    same = all(torch.equal(before[name], after[name]) for name in before)
    # Another stage overflowed: the optimizer skips the step.
    step(engine, gradients(rank), size)
    engine.take_back()
    after = engine.gather_state(control)["residuals"]
    same = same and all(torch.equal(before[name], after[name]) for name in before)
    return {"spoiled": bool(sums["big"].isfinite().any()), "others": bool(sums["conv"].isfinite().all()), "same": same}


def _resumed(engine: CompressionEngine, control: Any, rank: int, size: int, codec: Compressor) -> bool:
    state: list[Any] = [engine.gather_state(control)]
    dist.broadcast_object_list(state, 0)
    again = CompressionEngine(
        CompressionPolicy.of(codec), group=engine._site.group, device=torch.device("cpu"), loss_scale=lambda: 8.0
    )
    again.load_state(state[0])
    again.take_up({name: torch.empty(shape) for name, shape in SHAPES.items()})
    same = True
    for _ in range(3):
        one, other = step(engine, gradients(rank + 1), size), step(again, gradients(rank + 1), size)
        same = same and all(torch.equal(one[name], other[name]) for name in SHAPES)
    again.close()
    return same


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_contract(size: int) -> None:
    results = run_ranks(size, _contract, NAMES, timeout=120)
    for name in NAMES:
        first = results[0][name]
        for other in (result[name] for result in results[1:]):
            for key in ("first", "torch.float16", "torch.bfloat16", "torch.float64"):
                assert all(torch.equal(first[key][part], other[key][part]) for part in SHAPES), (name, key)
            assert other["nan"] == first["nan"]
        assert all(result[name]["resumed"] for result in results), name
        assert max(first["exact"].values()) < 1e-6, (name, first["exact"])
        if name != "topk with momentum":  # which gives up what it clears; see the test below
            assert max(first["outstanding"].values()) < OUTSTANDING[name], (name, first["outstanding"])
            assert max(first["mass"].values()) < 2e-4 * STEPS, (name, first["mass"])
        assert first["nan"] == {"spoiled": False, "others": True, "same": True}, name
        for kind, (finite, errors) in first["kinds"].items():
            assert finite, (name, kind)
            if kind == "zeros":
                assert all(not bool(error.any()) for error in errors.values()), (name, errors)


def _corrected(rank: int, size: int) -> list[dict[str, float]]:
    """How far sums are from those of the paper's algorithm, in one process."""
    group: Any = dist.new_group(backend="gloo")
    codec = TopK(ratio=0.05, momentum=MOMENTUM)
    engine = CompressionEngine(CompressionPolicy.of(codec), group=group, device=torch.device("cpu"))
    names = [name for name in SHAPES if name not in ("bias", "tiny")]
    velocity = {(r, name): torch.zeros(SHAPES[name]).view(-1) for r in range(size) for name in names}
    left = {key: torch.zeros_like(value) for key, value in velocity.items()}
    differences = []
    for number in range(8):
        sums = step(engine, gradients(rank + 10 * number), size)
        expected = {name: torch.zeros_like(left[0, name]) for name in names}
        for r, name in velocity:
            own = gradients(r + 10 * number)[name].view(-1) / size
            velocity[r, name] = own.add(velocity[r, name], alpha=MOMENTUM)
            left[r, name].add_(velocity[r, name])
            sent = largest(left[r, name], codec.count(own.numel()))
            values = left[r, name][sent].bfloat16().float()
            expected[name][sent] += values
            left[r, name][sent] -= values
            velocity[r, name][sent] = 0
        differences.append({name: float((sums[name].view(-1) - expected[name]).abs().max()) for name in names})
    engine.close()
    return differences


@pytest.mark.parametrize("size", [1, 3])
def test_momentum_correction_is_that_of_the_paper(size: int) -> None:
    for differences in run_ranks(size, _corrected, timeout=60):
        for number, step_of in enumerate(differences):
            assert max(step_of.values()) < 1e-5, (number, step_of)


def _fail(rank: int, world: int) -> None:
    if rank == 1:
        Int8.encode = _broken  # type: ignore[method-assign]
    trainer = make_trainer(CASE, make_strategy(Layout(1, 2, {"compression": Int8(min_numel=1)})), world, "", Record())
    trainer.fit(CASE.module(), **loaders(CASE, 2))


def _broken(codec: Int8, values: Tensor) -> Tensor:
    raise ArithmeticError("the codec is broken")


@pytest.mark.filterwarnings("ignore")
def test_a_failure_while_encoding_ends_all_ranks() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1.*ArithmeticError: the codec is broken") as failure:
        run_ranks(2, _fail, timeout=40)
    assert failure.value.rank == 1
    assert set(failure.value.errors) == {0, 1}
    assert "rank 1" in failure.value.errors[0]
