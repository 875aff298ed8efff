"""Optimizer state collected from the stages."""

from typing import Any

import pytest
import torch

from lightning_cnnpar.checkpoint.optimizer import gather_optimizer_state
from lightning_cnnpar.mesh import create_mesh
from tests.ranks import RankError, run_ranks


def gathered(rank: int, world_size: int, sizes: list[list[int]]) -> dict[str, Any]:
    """Rank r owns the parameters of odd or even index; its state is its own rank."""
    mesh = create_mesh(1, world_size)
    owners = [i % world_size for i in range(sum(sizes[rank]))]
    # Columns in another order than rows, as a channels_last tensor has.
    entries = {i: {"moment": torch.full((3, 2), float(i)).T} for i, owner in enumerate(owners) if owner == rank}
    groups = [{"params": list(range(size)), "lr": 0.1} for size in sizes[rank]]
    return gather_optimizer_state({"state": entries, "param_groups": groups}, owners, mesh)


def test_entries_of_all_stages_in_the_order_of_their_indices() -> None:
    state = run_ranks(2, gathered, [[3, 2], [3, 2]])[0]["state"]
    assert list(state) == [0, 1, 2, 3, 4]
    for i, entry in state.items():
        assert torch.equal(entry["moment"], torch.full((2, 3), float(i)))
        assert entry["moment"].stride() == (1, 2)


def test_groups_that_differ_between_ranks_are_refused() -> None:
    with pytest.raises(
        RankError, match=r"groups of \[3, 2\] parameters on rank 0 of the replica and of \[3, 1\] on rank 1"
    ):
        run_ranks(2, gathered, [[3, 2], [3, 1]])
