"""Optimizer state over stages: one process's indices in the file, each rank's own entries in memory."""

from collections.abc import Sequence
from typing import Any

from lightning_cnnpar.checkpoint.gather import receive_tree, send_tree
from lightning_cnnpar.mesh import Mesh


def gather_optimizer_state(
    state: dict[str, Any], owners: Sequence[int | None], mesh: Mesh, destination: int = 0
) -> dict[str, Any]:
    """Collect the entries of all stages; a collective of the replica.

    Args:
        state: `optimizer.state_dict()` of this rank. Placeholders keep their place in the groups, so indices are
            global.
        owners: For each index the owner's index in the replica; `None` for a parameter that every rank holds.
        mesh: The grid.
        destination: Index in the replica of the rank that gets all.

    Returns:
        On `destination` the state dict that one process would give; on other ranks `state`.

    Raises:
        RuntimeError: If the ranks have different parameter groups, so that indices mean different parameters.
    """
    entries, sizes = state["state"], [len(group["params"]) for group in state["param_groups"]]
    if mesh.pipeline_rank != destination:
        own = {i: entries[i] for i in _owned(owners, mesh.pipeline_rank) if i in entries}
        send_tree((sizes, own), mesh, destination)
        return state
    merged = {i: entry for i, entry in entries.items() if not isinstance(i, int) or owners[i] in (None, destination)}
    for source in range(mesh.pipeline_size):
        if source != destination:
            theirs, received = receive_tree(mesh, source)
            if theirs != sizes:
                raise RuntimeError(
                    f"An optimizer has groups of {sizes} parameters on rank {destination} of the replica and of"
                    f" {theirs} on rank {source}: add parameters and groups on every rank alike, whatever their values"
                    f" and whether they are placeholders of another stage."
                )
            merged.update(received)
    ordered = dict(sorted(merged.items(), key=lambda item: (not isinstance(item[0], int), item[0])))
    return {**state, "state": ordered}


def local_optimizer_state(state: dict[str, Any], owners: Sequence[int | None], rank: int) -> dict[str, Any]:
    """What a rank keeps of a full state dict: groups whole, entries of its own parameters."""
    kept = {i: e for i, e in state["state"].items() if not isinstance(i, int) or owners[i] in (None, rank)}
    return {**state, "state": kept}


def _owned(owners: Sequence[int | None], rank: int) -> list[int]:
    return [i for i, owner in enumerate(owners) if owner == rank]
