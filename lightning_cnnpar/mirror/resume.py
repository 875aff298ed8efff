"""Positions in an epoch as a checkpoint holds them: any layout goes on with exactly the samples that are left."""

import itertools
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cnnpar.mirror.sharded_sampler import Position, ShardedSampler


def epoch_position(loader: Any, batches: int) -> dict[str, Any] | None:
    """Where a loader from `shard_loader` is in its epoch, in types that `torch.load(weights_only=True)` reads.

    Call it on a rank that loads, the first of its replica; `None` on others, between epochs, and where the order isn't
    known (iterable data sets, samplers without a length, indices that aren't integers).

    Args:
        loader: Sharded, and mirrored or not.
        batches: How many batches of this epoch this replica has trained on. More may have been fetched.
    """
    sampler = _sharded_sampler(loader)
    if sampler is None or sampler.epoch_size() is None or not 0 < batches < len(sampler):
        return None
    position = sampler.epoch_position(batches)
    packed = _pack_order(position.order) if position is not None else None
    if position is None or packed is None:
        return None
    order, lengths = packed
    return {"order": order, "lengths": lengths, "items": position.items, "batches": position.batches}


def resume_epoch(loader: Any, position: dict[str, Any], randomness: dict[str, Any] | None = None) -> bool:
    """Let the next epoch of `loader` be the rest of the one that `epoch_position` saw; every rank calls it.

    The layout may be another one. For that epoch `len(loader)` is the number of batches taken before plus those left.

    Args:
        loader: Sharded, and mirrored or not.
        position: What `epoch_position` returned.
        randomness: States (`capture_randomness`) to set when the first batch is asked for, so that what is drawn from
            then on is what an uninterrupted epoch would have drawn.

    Returns:
        Whether it will. Otherwise, with a warning, the loader starts an epoch anew.
    """
    sampler = _sharded_sampler(loader)
    if sampler is None:
        return False
    order = _unpack_order(position["order"], position["lengths"])
    if sampler.epoch_size() != len(order):
        warnings.warn(
            f"The checkpoint was written in the middle of an epoch of {len(order)} samples (or batches), but the"
            f" training loader has {sampler.epoch_size()} now. It starts a new epoch; samples seen before may be"
            " seen again.",
            stacklevel=2,
        )
        return False
    items, batches = position["items"], position["batches"]
    sampler.resume_epoch(Position(order=order, items=items, batches=batches, randomness=randomness))
    return True


def _sharded_sampler(loader: Any) -> ShardedSampler | None:
    if not isinstance(loader, DataLoader):
        return None
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return sampler if isinstance(sampler, ShardedSampler) else None


def _pack_order(order: Any) -> tuple[Tensor, Tensor | None] | None:
    if all(type(item) is int for item in order):
        return torch.tensor(order, dtype=torch.int64), None
    if not all(isinstance(item, list | tuple) for item in order):
        return None
    flat = list(itertools.chain.from_iterable(order))
    if not all(type(item) is int for item in flat):
        return None
    return torch.tensor(flat, dtype=torch.int64), torch.tensor([len(item) for item in order], dtype=torch.int64)


def _unpack_order(order: Tensor, lengths: Tensor | None) -> list[Any]:
    flat = order.tolist()
    if lengths is None:
        return flat
    items = iter(flat)
    return [list(itertools.islice(items, length)) for length in lengths.tolist()]
