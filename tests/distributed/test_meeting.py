"""Replicas that meet exchange what they say, and are told by name when they meet for different things."""

import pytest

from lightning_cnnpar.mesh import DifferentPointsError, create_mesh, meet
from tests.ranks import run_ranks

LONG = bytes(range(256)) * 9


def _meet(rank: int, world: int) -> list[list[bytes]]:
    mesh = create_mesh(data_size=3, pipeline_size=1)
    said = [b"", bytes([rank]) * 5, LONG[: 700 * rank], LONG * (rank == 1)]
    return [meet(mesh, f"says {i}", payload) for i, payload in enumerate(said)]


def test_payloads_of_any_length_reach_all_replicas() -> None:
    for empty, short, growing, one in run_ranks(3, _meet):
        assert empty == [b"", b"", b""]
        assert short == [b"\0" * 5, b"\1" * 5, b"\2" * 5]
        assert growing == [b"", LONG[:700], LONG[:1400]]
        assert one == [b"", LONG, b""]


def _miss(rank: int, world: int) -> str:
    mesh = create_mesh(data_size=2, pipeline_size=1)
    with pytest.raises(DifferentPointsError) as error:
        meet(mesh, "averages gradients" if rank else "takes a batch", LONG if rank else b"")
    assert meet(mesh, "goes on", b"fine") == [b"fine", b"fine"]
    return str(error.value)


def test_different_points_are_named_on_every_replica() -> None:
    for text in run_ranks(2, _miss):
        assert "replica 0 takes a batch; replica 1 averages gradients" in text
