"""Where ranks stand in the grid, and which of them share a group."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lightning_cnnpar.mesh import Coordinates, Mesh, create_mesh
from tests.ranks import run_ranks

GROUPS = ("data_group", "statistics_group", "pipeline_group", "control_group", "data_control_group")


@pytest.mark.parametrize(
    ("rank", "pipeline_size", "data", "pipeline"),
    [(0, 1, 0, 0), (3, 1, 3, 0), (0, 3, 0, 0), (2, 3, 0, 2), (3, 3, 1, 0), (5, 3, 1, 2), (3, 4, 0, 3)],
)
def test_ranks_of_a_replica_are_neighbours(rank: int, pipeline_size: int, data: int, pipeline: int) -> None:
    assert Coordinates.of(rank, pipeline_size) == Coordinates(data=data, pipeline=pipeline)


@given(st.integers(0, 1000), st.integers(1, 16))
def test_coordinates_and_ranks_are_one_to_one(rank: int, pipeline_size: int) -> None:
    coordinates = Coordinates.of(rank, pipeline_size)
    assert 0 <= coordinates.pipeline < pipeline_size
    assert coordinates.rank(pipeline_size) == rank


def test_one_process_needs_no_groups() -> None:
    mesh = create_mesh(1, 1, timeout=timedelta(seconds=5))
    assert mesh == Mesh(timeout=timedelta(seconds=5))
    assert (mesh.world_size, mesh.data_rank, mesh.pipeline_rank, mesh.global_rank(0)) == (1, 0, 0, 0)


@pytest.fixture
def fake_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Start groups of ranks that don't exist: enough for the arithmetic."""
    new_group = dist.new_group

    def without_others(ranks: list[int], timeout: timedelta, backend: str | None) -> Any:
        return new_group(ranks, timeout=timeout, backend="fake")

    monkeypatch.setattr(dist, "new_group", without_others)

    def start(rank: int, world_size: int) -> None:
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)

    return start


@pytest.mark.parametrize(("data_size", "pipeline_size"), [(3, 2), (1, 6), (2, 2), (4, 1)])
def test_the_sizes_have_to_fit_the_world(
    fake_ranks: Callable[[int, int], None], data_size: int, pipeline_size: int
) -> None:
    fake_ranks(0, 8)
    product = data_size * pipeline_size
    with pytest.raises(
        ValueError, match=f"={data_size} x .*={pipeline_size} needs {product} ranks, but 8 were started"
    ):
        create_mesh(data_size, pipeline_size)


@pytest.mark.parametrize(
    ("rank", "data", "pipeline", "column", "row"),
    [(0, 0, 0, [0, 3], [0, 1, 2]), (2, 0, 2, [2, 5], [0, 1, 2]), (4, 1, 1, [1, 4], [3, 4, 5])],
)
def test_a_row_is_a_replica_and_a_column_a_stage(
    fake_ranks: Callable[[int, int], None], rank: int, data: int, pipeline: int, column: list[int], row: list[int]
) -> None:
    fake_ranks(rank, 6)
    mesh = create_mesh(2, 3)
    assert (mesh.world_size, mesh.data_rank, mesh.pipeline_rank) == (6, data, pipeline)
    assert [mesh.global_rank(member) for member in range(3)] == row
    members = {name: dist.get_process_group_ranks(getattr(mesh, name)) for name in GROUPS}
    expected = dict.fromkeys(("data_group", "statistics_group", "data_control_group"), column)
    assert members == {**expected, "pipeline_group": row, "control_group": row}


@pytest.mark.parametrize(("data_size", "pipeline_size", "none"), [(4, 1, "pipeline_group"), (1, 4, "data_group")])
def test_an_axis_of_one_has_no_group(
    fake_ranks: Callable[[int, int], None], data_size: int, pipeline_size: int, none: str
) -> None:
    fake_ranks(1, 4)
    mesh = create_mesh(data_size, pipeline_size)
    assert getattr(mesh, none) is None
    assert sum(getattr(mesh, name) is not None for name in GROUPS) in (2, 3)


def _sums(rank: int, world_size: int) -> list[float]:
    mesh = create_mesh(2, 2, timeout=timedelta(seconds=30))
    values = [torch.tensor(float(10**rank)) for _ in GROUPS]
    for name, value in zip(GROUPS, values, strict=True):
        dist.all_reduce(value, group=getattr(mesh, name))
    return [value.item() for value in values]


@pytest.mark.distributed
def test_groups_communicate_within_themselves() -> None:
    columns, rows = [101.0, 1010.0] * 2, [11.0, 11.0, 1100.0, 1100.0]
    for rank, sums in enumerate(run_ranks(4, _sums)):
        assert sums == [columns[rank], columns[rank], rows[rank], rows[rank], columns[rank]]
