"""What goes wrong ends soon, on every rank, and says where."""

import dataclasses
from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn

from lightning_cnnpar.pipeline.errors import CollectiveMismatchError, PeerError, PipelineError
from tests.ranks import run_ranks
from tests.unit.pipeline.graphs import GraphNet, Step, chain, conv, head, only
from tests.unit.pipeline.pairs import Pair, images


def test_ranks_in_different_calls() -> None:
    """Both ranks say what each one was in: rank 1 misses its input, rank 0 the output."""
    first, second = run_ranks(2, _call_in_different_places)
    for message in (first, second):
        assert "on_validation_end" in message
        assert "validation_step, batch 0" in message
        assert "whole_module()" in message
    assert "Rank 1 of the replica is in network 'model' in validation_step, batch 0" in second


def _call_in_different_places(rank: int, world_size: int) -> str:
    # Two stages that both read the input: neither waits for the other before it sends.
    steps: list[Step] = [("a", conv(3, 4), ("in0",)), ("b", conv(3, 4), ("in0",))]
    pair = Pair(GraphNet(steps, ["a", "b"]), [0, 1], [0, 1], 2)
    pair.network((images(),), {}, label="training_step, batch 0")
    with pytest.raises(CollectiveMismatchError) as error:
        pair.network((images(),), {}, label="validation_step, batch 0" if rank else "on_validation_end")
    return str(error.value)


def _call_on_one_rank(rank: int, world_size: int) -> str:
    pair = Pair(chain(), [0, 2], [0, 1], 2)
    if rank == 1:
        torch.distributed.barrier()
        return ""
    link = pair.network._site.link  # type: ignore[union-attr]
    link._mesh = dataclasses.replace(link._mesh, timeout=timedelta(seconds=1))
    with pytest.raises(PeerError) as error:
        pair.network((images(),), {}, label="validation_step, batch 3")
    torch.distributed.barrier()
    return str(error.value)


def test_a_call_on_one_rank_ends_in_time() -> None:
    message, _ = run_ranks(2, _call_on_one_rank)
    assert (
        "Rank 0 of the replica could not receive from rank 1 in network 'model' in validation_step, batch 3" in message
    )
    assert "the limit is 1 s" in message


class _Fails(nn.Module):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.at:
            raise ValueError("no such thing")
        return x


def _fail(rank: int, world_size: int) -> list[str]:
    steps: list[Step] = [("a", conv(3, 4), ("in0",)), ("fails", _Fails(1), ("a",)), ("d", head(4), ("fails",))]
    pair = Pair(GraphNet(steps, ["d"], only), [0, 1], [0, 1], 2)
    x, before = images(), torch.get_rng_state()
    with pytest.raises((ValueError, PeerError)) as error:
        pair.network((x,), {}, label="training_step, batch 7")
    assert torch.equal(torch.get_rng_state(), before)
    return [str(error.value), *getattr(error.value, "__notes__", [])]


def test_an_error_in_a_stage_says_where() -> None:
    other, own = run_ranks(2, _fail)
    assert own[0] == "no such thing"
    assert own[1] == (
        "Raised in the forward of stage 1 on rank 1 of the replica, microbatch 1 of 2, network 'model' in"
        " training_step, batch 7, call 1 (train, grad, 8 samples in 2 microbatches)."
    )
    assert "rank 1" in other[0]


def _vary(rank: int, world_size: int) -> str:
    steps: list[Step] = [
        ("a", lambda x: x[x[:, 0, 0, 0] > 0].sum((2, 3)), ("in0",)),
        ("d", lambda a: a.sum(1), ("a",)),
    ]
    pair = Pair(GraphNet(steps, ["d"], only), [0, 1], [0, 1], 2)
    x = torch.ones(4, 3, 2, 2)
    x[3] = -1
    with pytest.raises(PipelineError) as error:
        pair.network((x,), {}, label="step")
    return str(error.value)


def test_shapes_that_depend_on_the_data() -> None:
    message, _ = run_ranks(2, _vary)
    assert "'a'" in message
    assert "(2, 3)" in message
    assert "(1, 3)" in message
    assert "num_microbatches=1" in message
