"""BatchNorm and dropout in a cut network."""

import copy
import random
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_cnnpar.mesh import create_mesh
from tests.ranks import run_ranks
from tests.unit.pipeline.graphs import GraphNet, Step, chain, conv, head, only
from tests.unit.pipeline.pairs import Pair, images


def _same_in_every_microbatch(samples: int, repeats: int) -> torch.Tensor:
    return images(samples).repeat(repeats, 1, 1, 1)


def _keep_statistics(rank: int, world_size: int) -> list[int]:
    torch.set_default_dtype(torch.float64)
    mesh = create_mesh(1, world_size)
    steps: list[Step] = [
        ("norm", nn.BatchNorm2d(3), ("in0",)),
        ("a", conv(3, 4), ("in0",)),
        ("other", nn.BatchNorm2d(3, momentum=None), ("in0",)),
        (
            "b",
            lambda norm, a, other: norm.sum((1, 2, 3)) + a.sum((1, 2, 3)) + other.sum((1, 2, 3)),
            ("norm", "a", "other"),
        ),
    ]
    # Both layers see the inputs themselves, so their statistics have to be those of the whole batch exactly.
    pair = Pair(GraphNet(steps, ["b"], only), [0, 2], [0, 1], 3, mesh=mesh)
    for batch in (8, 5, 8):
        x = images(batch)
        pair.network((x,), {}, label="step")
        pair.whole(x)
    pair.train(False)
    pair.call(images())
    pair.check()
    # One microbatch: deferring changes nothing at all.
    single = Pair(chain(norm=True), [0, 2], [0, 1], 1, mesh=mesh)
    for _ in range(2):
        single.step(images())
    return [int(b) for n, b in pair.net.named_buffers() if n.endswith("tracked") and n.split(".")[0] in pair.own]


@pytest.mark.case("C24")
def test_statistics_are_those_of_the_whole_batch() -> None:
    assert run_ranks(2, _keep_statistics) == [[3], [3]]


def _normalise_microbatches(rank: int, world_size: int) -> None:
    """Microbatches with equal contents have the statistics of the whole batch: then deep layers are exact too."""
    torch.set_default_dtype(torch.float64)
    net = chain(norm=True)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    pair = Pair(net, [0, 2], [0, 1], 4)
    # The unbiased variance of a repeated batch differs by its count alone; merging has to get that right.
    pair.step(_same_in_every_microbatch(2, 4))


def test_deep_statistics_and_gradients() -> None:
    run_ranks(2, _normalise_microbatches)


class _Checkpointed(nn.Module):
    """Computes its forward again in the backward, as users do to save memory."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(lambda x: self.drop(self.norm(x)), x, use_reentrant=False)
        return out


def _compute_again(rank: int, world_size: int) -> list[float]:
    torch.set_default_dtype(torch.float64)
    steps: list[Step] = [("a", _Checkpointed(), ("in0",)), ("b", _Checkpointed(), ("a",)), ("d", head(3), ("b",))]
    pair = Pair(GraphNet(steps, ["d"], only), [0, 1], [0, 1], 4)
    x = images().requires_grad_()
    before = torch.get_rng_state()
    torch.autograd.backward(pair.network((x,), {}, label="step").square().mean())
    assert torch.equal(torch.get_rng_state(), before)
    if rank == 0:
        pair.compare("mean", pair.net.get_buffer("a.norm.running_mean"), x.detach().mean((0, 2, 3)) * 0.1)
    own = [buffer for name, buffer in pair.net.named_buffers() if name.split(".")[0] in pair.own]
    return [buffer.item() for buffer in own if buffer.dim() == 0]


def test_a_forward_that_is_computed_again_counts_once() -> None:
    assert run_ranks(2, _compute_again) == [[1], [1]]


def _advise(rank: int, world_size: int) -> tuple[list[str], int]:
    pair = Pair(chain(norm=True), [0, 2], [0, 1], 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair.network((images(4),), {}, label="step")
        pair.network((images(5),), {}, label="step")
    pair.train(False)
    pair.network((images(4),), {}, label="step")
    tracked = next(b for n, b in pair.net.named_buffers() if n.endswith("tracked") and n.split(".")[0] in pair.own)
    return [str(warning.message) for warning in caught], int(tracked)


@pytest.mark.case("C13")
def test_single_samples_and_batch_norm() -> None:
    (told, tracked), other = run_ranks(2, _advise)
    assert len(told) == 1
    assert "A batch of 4 samples in 4 microbatches would leave single samples" in told[0]
    assert "num_microbatches=2" in told[0]
    assert tracked == 2
    assert other == ([], 2)


def _drop(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, list[torch.Tensor]]]:
    steps: list[Step] = [
        ("first", nn.Dropout(0.5), ("in0",)),
        ("mean", lambda x: x.flatten(1)[:, :16], ("first",)),
        ("second", nn.Dropout(0.5), ("mean",)),
        ("out", lambda a, b: torch.cat([a, b], 1), ("mean", "second")),
    ]
    pair = Pair(GraphNet(steps, ["out"], only), [0, 2], [0, 1], 2)
    torch.manual_seed(5)
    random.seed(5)
    x = torch.ones(4, 3, 4, 4)
    before = torch.get_rng_state()
    first = pair.network((x,), {}, label="step")
    assert torch.equal(torch.get_rng_state(), before)
    saved = copy.deepcopy(pair.network.state_dict())
    second = pair.network((x,), {}, label="step")
    pair.network.load_state_dict(saved)
    assert torch.equal(pair.network((x,), {}, label="step"), second)
    assert not torch.equal(first, second)
    # Microbatches draw different masks.
    assert not torch.equal(first[:2], first[2:])
    # What the user draws next is the same on every rank.
    return first, torch.rand(3), saved


@pytest.mark.case("C34")
def test_dropout_draws_from_streams_of_its_own() -> None:
    (first, drawn, saved), (other, also_drawn, also_saved) = run_ranks(2, _drop)
    assert torch.equal(first, other)
    assert torch.equal(drawn, also_drawn)
    assert (list(saved), list(also_saved)) == (["0"], ["1"])


def _differ(rank: int, world_size: int) -> torch.Tensor:
    mesh = create_mesh(2, 1)
    steps: list[Step] = [("drop", nn.Dropout(0.5), ("in0",)), ("d", head(3), ("drop",))]
    pair = Pair(GraphNet(steps, ["d"], only), [0], [0], 2, mesh=mesh)
    torch.manual_seed(3)
    expected = torch.random.get_rng_state()
    out: torch.Tensor = pair.network((images(),), {}, label="step")
    # With one rank per replica the network is an ordinary one: it draws from the user's generator.
    assert not torch.equal(torch.random.get_rng_state(), expected)
    return out.detach()


def test_without_a_pipeline_dropout_is_the_users() -> None:
    run_ranks(2, _differ)
