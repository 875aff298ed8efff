"""Replicas that stop together in training.

Gradients are averaged over all replicas in every step, so one that has no batch left would leave the others waiting.

    replica 0   batch  batch  batch  batch
    replica 1   batch  batch  batch  end
                  1      1      1     stop      <- the fourth batch of replica 0 isn't trained on
"""

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_cnnpar.mirror.exchange import Exchange
from lightning_cnnpar.mirror.layers import Layer, Start, add_layer, layers_of
from lightning_cnnpar.mirror.sharded_sampler import ShardedSampler

_ENDED, _READY, _FAILED = range(3)


def end_together(loader: Any, exchange: Exchange) -> Any:
    """A loader like `loader` whose epochs have equally many batches on all replicas."""
    if exchange.size == 1 or any(isinstance(layer, SameLength | StopTogether) for layer in layers_of(loader)):
        return loader
    if isinstance(loader, list | tuple):
        return add_layer(loader, SameLength(exchange))
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        # Even where they have a length, it needn't be what they yield.
        return add_layer(loader, StopTogether(exchange))
    if any(isinstance(sampler, ShardedSampler) for sampler in (loader.batch_sampler, loader.sampler)):
        # Dealt out evenly.
        return loader
    try:
        len(loader)
    except TypeError:
        return add_layer(loader, StopTogether(exchange))
    return add_layer(loader, SameLength(exchange))


class SameLength(Layer):
    """For loaders whose length can be trusted: compared once, at the start of an epoch."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def iterate(self, start: Start, loader: Any) -> Iterator[Any]:
        """See `Layer.iterate`."""
        lengths = self._exchange.gather(len(loader))
        iterator = start()
        shortest = min(lengths)
        if shortest == max(lengths):
            return iterator
        _warn_uneven(self._exchange, [replica for replica, n in enumerate(lengths) if n == shortest], shortest, lengths)
        return itertools.islice(iterator, shortest)


class StopTogether(Layer):
    """For loaders of unknown length: before each batch all replicas say whether they have one."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def iterate(self, start: Start, loader: Any) -> Iterator[Any]:
        """See `Layer.iterate`."""
        return self._agreed(start())

    def _agreed(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for count in itertools.count():
            try:
                batch = next(iterator)
            except StopIteration:
                states = self._exchange.gather(_ENDED)
            except Exception:
                self._exchange.gather(_FAILED)
                raise
            else:
                states = self._exchange.gather(_READY)
            if _FAILED in states:
                failed = states.index(_FAILED)
                raise RuntimeError(
                    f"The data loader of replica {failed} failed at batch {count}; see that rank's error."
                )
            if _ENDED in states:
                if _READY in states:
                    out = [replica for replica, state in enumerate(states) if state == _ENDED]
                    _warn_uneven(self._exchange, out, count)
                return
            yield batch


def _warn_uneven(exchange: Exchange, ended: list[int], count: int, lengths: list[int] | None = None) -> None:
    if exchange.index:
        return
    names = f"Replica {ended[0]}" if len(ended) == 1 else f"Replicas {', '.join(map(str, ended))}"
    detail = f" (batches by replica: {lengths})" if lengths else ""
    warnings.warn(
        f"{names} ran out of data after {count} batches while others had more{detail}. All replicas end the epoch"
        f" there: each step averages gradients over all of them. Divide the data evenly to train on all of it.",
        stacklevel=2,
    )
