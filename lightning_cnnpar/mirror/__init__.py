"""Batches and randomness shared by a replica.

user's loader ──► shard_loader: samples of this replica ──► mirror_loader: the same batch on all its ranks
"""

from lightning_cnnpar.mirror.loader import mirror_loader
from lightning_cnnpar.mirror.randomness import (
    capture_randomness,
    restore_randomness,
    share_randomness,
    step_generators,
)
from lightning_cnnpar.mirror.resume import epoch_position, resume_epoch
from lightning_cnnpar.mirror.sampling import ShardedIterable, shard_loader

__all__ = [
    "ShardedIterable",
    "capture_randomness",
    "epoch_position",
    "mirror_loader",
    "restore_randomness",
    "resume_epoch",
    "shard_loader",
    "share_randomness",
    "step_generators",
]
