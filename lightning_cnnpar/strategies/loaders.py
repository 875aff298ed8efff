"""The Trainer's loaders: sharded over the replicas, one for each replica, its batches shared by the replica's ranks."""

import functools
import os
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader

from lightning_cnnpar.mesh import Mesh
from lightning_cnnpar.mirror import mirror_loader, shard_loader

_TRAINING = ("train", "RunningStage.TRAINING")


def distribute_loader(loader: Any, mesh: Mesh, *, stage: str, use_sampler: bool) -> Any:
    """What a rank iterates in place of the user's loader.

    Args:
        loader: A `DataLoader` or any iterable.
        mesh: The grid.
        stage: "train", "validate", "sanity_check", "test" or "predict".
        use_sampler: Whether samples are to be split over the replicas (`Trainer(use_distributed_sampler=...)`).
    """
    if mesh.world_size == 1:
        return loader
    training = stage in _TRAINING
    if isinstance(loader, DataLoader):
        _seed_workers_by_replica(loader, mesh)
    if use_sampler:
        loader = shard_loader(loader, mesh, training=training)
    return mirror_loader(loader, mesh, training=training)


def _seed_workers_by_replica(loader: DataLoader[Any], mesh: Mesh) -> None:
    """Seed workers by replica rather than by rank, so that random crops don't change with the pipeline size."""
    if os.environ.get("PL_SEED_WORKERS", "0") == "1" and loader.worker_init_fn is None:
        loader.worker_init_fn = functools.partial(pl_worker_init_function, rank=mesh.data_rank)
