"""Whole tensors from the pieces that replicas hold (ZeRO), on the first replica only.

    replica 0   state_dict: [ w 0..5 ]  ──────────────► [ w 0..9 ] in the parameter's shape
    replica 1   state_dict: [ w 5..9 ]  ─ send piece ─┘

Every rank that holds a stage takes part, each with its own copy of the same container. It runs over CPU groups, tensor
by tensor, so that nobody but the first replica ever holds more than its pieces.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cnnpar.checkpoint.gather import as_bytes, found_in, replaced_in
from lightning_cnnpar.data_parallel.sharding import Sharding
from lightning_cnnpar.data_parallel.shards import Slot, Unit, owned_span
from lightning_cnnpar.mesh import Mesh


def merge_pieces(value: Any, sharding: Sharding, mesh: Mesh) -> Any:
    """Replace the pieces of parameters in nested containers, such as a checkpoint.

    Returns:
        On the first replica, a container with whole tensors on CPU; on others, one with copies of their pieces, which
        no later call takes for pieces again.
    """
    pieces = found_in(value, lambda leaf: sharding.piece_of(leaf) if isinstance(leaf, Tensor) else None)
    whole: dict[tuple[Any, ...], Any] = {}
    for path, tensor, (slot, unit) in pieces:
        merged = _merge(tensor, slot, unit, mesh)
        whole[path] = tensor.clone() if merged is None else merged
    return replaced_in(value, whole) if whole else value


def merge_optimizer_pieces(state: dict[str, Any], slots: Sequence[Slot | None], sharding: Sharding, mesh: Mesh) -> Any:
    """Replace the pieces in an optimizer's state dict.

    Args:
        state: `optimizer.state_dict()` of this rank.
        slots: For each index where its parameter is; `None` for one that is not cut.
        sharding: The units.
        mesh: The grid.

    Returns:
        On the first replica, the state that uncut parameters would have; on others `state`.
    """
    entries = dict(state["state"])
    for index in sorted(key for key in entries if isinstance(key, int)):
        slot = slots[index]
        if slot is None:
            continue
        entry = dict(entries[index])
        for key in sorted(entry, key=str):
            if is_piece_of_state(key, entry[key], slot):
                merged = _merge(entry[key], slot, sharding.unit_of(slot), mesh)
                entry[key] = entry[key] if merged is None else merged
        entries[index] = entry
    return {**state, "state": entries}


def is_piece_of_state(key: Any, value: Any, slot: Slot) -> bool:
    """Whether an optimizer's state is by element of the parameter, and so in pieces."""
    start, stop = slot.span
    return key != "step" and isinstance(value, Tensor) and value.dim() == 1 and value.numel() == stop - start


def _merge(piece: Tensor, slot: Slot, unit: Unit, mesh: Mesh) -> Tensor | None:
    own = piece.detach().cpu().contiguous()
    group = mesh.data_control_group
    if mesh.data_rank > 0:
        if own.numel():
            dist.send(as_bytes(own), group=group, group_dst=0)
        return None
    flat = torch.empty(slot.numel, dtype=own.dtype)
    flat[slot.span[0] : slot.span[1]] = own
    for source in range(1, mesh.data_size):
        start, stop = owned_span(slot.offset, slot.numel, unit.share, source)
        if stop > start:
            dist.recv(as_bytes(flat[start:stop]), group=group, group_src=source)
    return slot.view(flat, 0)
