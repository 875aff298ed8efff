"""Which samples each replica loads.

The samplers that the user gave stay in charge: replica 0 asks them for the order of an epoch, hands it to the others,
and each replica takes its share (`shares`). So shuffling, weighting or balancing come out as in one process, whatever
the sampler and whichever random generator it draws from.
"""

import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    get_worker_info,
)

from lightning_cnnpar._compat import is_index_recorder, with_recorded_sampler
from lightning_cnnpar.mesh import Mesh
from lightning_cnnpar.mirror.agreement import end_together
from lightning_cnnpar.mirror.exchange import Exchange, GroupExchange
from lightning_cnnpar.mirror.layers import copy_loader
from lightning_cnnpar.mirror.sharded_sampler import ShardedSampler


def shard_loader(
    loader: Any, mesh: Mesh, *, training: bool, resumable: bool = False, exchange: Exchange | None = None
) -> Any:
    """A loader like `loader` that gives this replica its share of the samples.

    Every rank of a replica may call it; only the one that iterates the result talks to the other replicas, so exactly
    one rank of each replica must iterate it. `mirror_loader`, which comes next, sees to that.

    - A map-style `DataLoader` with any sampler: replica d takes the d-th part of each batch of D x b.
    - A batch sampler of the user's own: its batches stay whole, replica d takes batches d, d + D, ... In training the
      last round is filled with batches from the start.
    - A `DistributedSampler` that is already set to D replicas: left alone.
    - Iterable datasets and other iterables: left alone, with a warning; see `ShardedIterable`.

    In evaluation each sample counts once. In training all replicas end their epochs together: batches are dealt out in
    equal number and size, and where that can't be, the replica with the fewest decides.

    Args:
        loader: What the user's hook returned.
        mesh: The ranks.
        training: Whether the batches are trained on.
        resumable: With one replica too, keep track of the order, for `epoch_position`. Otherwise `loader` is returned.
        exchange: How the loading ranks talk; over the mesh's groups by default.

    Raises:
        ValueError: For a `DistributedSampler` of another number of replicas, or of another replica.
    """
    exchange = exchange or GroupExchange(mesh)
    sharded = _shard(loader, mesh, exchange, training, resumable)
    return end_together(sharded, exchange) if training else sharded


class ShardedIterable(IterableDataset[Any]):
    """Any iterable data set, cut so that each item is loaded once over all replicas and their workers.

    Every replica and worker goes through the whole of `dataset` and takes every n-th item, so use it where an item is
    cheap to pass over (file names, say) and do the costly part afterwards, in `transform`.

    Args:
        dataset: Gives the same items in the same order everywhere.
        transform: Applied to the items that are taken.
    """

    def __init__(self, dataset: Iterable[Any], transform: Any = None) -> None:
        self.dataset = dataset
        self.transform = transform
        self.num_replicas = 1
        self.replica = 0

    shards_itself = True

    def bind(self, replica: int, num_replicas: int) -> "ShardedIterable":
        """The part of one replica. The strategy does this for a data set that it finds in a `DataLoader`."""
        bound = ShardedIterable(self.dataset, self.transform)
        bound.replica, bound.num_replicas = replica, num_replicas
        return bound

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        workers, index = (worker.num_workers, worker.id) if worker else (1, 0)
        # Replica d takes items d, d + D, ... with any number of workers, so shares differ by one item at the most.
        first, step = index * self.num_replicas + self.replica, workers * self.num_replicas
        taken = itertools.islice(self.dataset, first, None, step)
        return taken if self.transform is None else map(self.transform, taken)


def _shard(loader: Any, mesh: Mesh, exchange: Exchange, training: bool, resumable: bool) -> Any:
    set_by_user = _distributed_sampler(loader)
    if set_by_user is not None:
        _check_distributed_sampler(set_by_user, exchange)
        return loader
    if _is_map_style(loader):
        needed = exchange.size > 1 or (resumable and training)
        return _shard_map_style(loader, exchange, training) if needed else loader
    if exchange.size == 1:
        return loader
    return _shard_stream(loader, exchange, speaks=mesh.pipeline_rank == 0 and exchange.index == 0)


def _is_map_style(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _shard_map_style(loader: DataLoader[Any], exchange: Exchange, training: bool) -> Any:
    batch_sampler: Any = loader.batch_sampler
    if batch_sampler is None:
        sampler = _sharded(loader.sampler, None, False, training, exchange, loader.sampler)
        return copy_loader(loader, sampler=sampler)
    if is_index_recorder(batch_sampler):
        return copy_loader(
            loader,
            batch_sampler=with_recorded_sampler(
                batch_sampler, lambda recorded: _shard_batches(recorded, exchange, training)
            ),
        )
    return copy_loader(loader, batch_sampler=_shard_batches(batch_sampler, exchange, training))


def _shard_batches(batch_sampler: Any, exchange: Exchange, training: bool) -> ShardedSampler:
    if type(batch_sampler) is BatchSampler:
        size, drop = batch_sampler.batch_size, batch_sampler.drop_last
        return _sharded(batch_sampler.sampler, size, drop, training, exchange, batch_sampler)
    # A batch sampler of the user's own has put each batch together on purpose: they stay whole.
    return _sharded(batch_sampler, None, False, training, exchange, batch_sampler)


def _sharded(
    items: Iterable[Any], batch_size: int | None, drop_last: bool, training: bool, exchange: Exchange, stands_for: Any
) -> ShardedSampler:
    return ShardedSampler(
        items,
        batch_size=batch_size,
        drop_last=drop_last,
        training=training,
        exchange=exchange,
        stands_for=stands_for,
    )


def _shard_stream(loader: Any, exchange: Exchange, *, speaks: bool) -> Any:
    source: Any = getattr(loader, "dataset", loader)
    if isinstance(loader, DataLoader) and isinstance(source, ShardedIterable):
        return copy_loader(loader, dataset=source.bind(exchange.index, exchange.size))
    if isinstance(loader, ShardedIterable):
        return loader.bind(exchange.index, exchange.size)
    if speaks and not getattr(source, "shards_itself", False):
        _warn_not_sharded(source, exchange.size)
    return loader


def _distributed_sampler(loader: Any) -> DistributedSampler[Any] | None:
    if not isinstance(loader, DataLoader):
        return None
    batch_sampler = loader.batch_sampler
    for candidate in (batch_sampler, getattr(batch_sampler, "sampler", None), loader.sampler):
        if isinstance(candidate, DistributedSampler):
            return candidate
    return None


def _check_distributed_sampler(sampler: DistributedSampler[Any], exchange: Exchange) -> None:
    if (sampler.num_replicas, sampler.rank) == (exchange.size, exchange.index):
        return
    raise ValueError(
        f"The {type(sampler).__name__} has num_replicas={sampler.num_replicas} and rank={sampler.rank}, but there are"
        f" {exchange.size} replicas of the network and this rank belongs to replica {exchange.index}: all ranks of a"
        " replica work on the same batch. Leave the DistributedSampler out (samplers are divided among the replicas"
        f" for you), or build it with num_replicas={exchange.size}, rank={exchange.index}"
        " (`trainer.strategy.distributed_sampler_kwargs`)."
    )


def _warn_not_sharded(source: Any, num_replicas: int) -> None:
    warnings.warn(
        f"`{type(source).__name__}` can't be divided among the {num_replicas} replicas from outside: each replica goes"
        " through all of it unless it divides its items by itself. Wrap it in `ShardedIterable`, or, if it does divide"
        " them, say so with an attribute `shards_itself = True`.",
        stacklevel=2,
    )
