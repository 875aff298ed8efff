"""One replica's share of what a sampler yields, with a position that a checkpoint can hold.

replica 0    user's sampler ──► order of the epoch ──┬──► its share, batch by batch
replica d                                            └──► its share
"""

import dataclasses
import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import Sampler

from lightning_cnnpar.mirror.exchange import Exchange
from lightning_cnnpar.mirror.layers import itself
from lightning_cnnpar.mirror.randomness import capture_randomness, restore_randomness
from lightning_cnnpar.mirror.shares import Shares, deal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """A point in an epoch.

    Attributes:
        order: All items of the epoch: samples, or batches of a batch sampler of the user's own.
        items: How many of them all replicas together have taken.
        batches: In how many batches of each replica.
        randomness: States to go on from (`capture_randomness`), if any.
    """

    order: Sequence[Any]
    items: int
    batches: int
    randomness: dict[str, Any] | None = None


class ShardedSampler(Sampler[Any]):
    """This replica's share of what another sampler yields.

    Attributes that aren't defined here, `set_epoch` and the like, are those of the sampler that it stands for.

    Args:
        items: The sampler that is asked, on replica 0 only.
        batch_size: Items in a batch; `None` if an item is a batch already.
        drop_last: Leave out a last batch that isn't full.
        training: How the tail is dealt out, see `deal`.
        exchange: The other replicas.
        stands_for: What the user put in this place of the loader.
    """

    def __init__(
        self,
        items: Iterable[Any],
        *,
        batch_size: int | None,
        drop_last: bool,
        training: bool,
        exchange: Exchange,
        stands_for: Any,
    ) -> None:
        self._items = items
        self._group = batch_size
        self._drop = drop_last
        self._training = training
        self._exchange = exchange
        self._stands_for = stands_for
        self._order: list[Any] = []
        self._rest: Iterator[Any] = iter(())
        self._start: Position | None = None
        self._begun = False

    def __len__(self) -> int:
        if self._start is not None:
            # Batches that were taken before the checkpoint count: whoever resumes counts on from them.
            left = self._deal(len(self._start.order) - self._start.items)
            return self._start.batches + left.num_batches(self._exchange.index)
        size: int = len(self._items)  # type: ignore[arg-type]
        return self._deal(size).num_batches(self._exchange.index)

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers asks twice before it begins.
        if self._begun:
            self._start = None
        return self._batches(self._start)

    def __getattr__(self, name: str) -> Any:
        if name == "_stands_for":
            # Not there yet while being copied or unpickled.
            raise AttributeError(name)
        return getattr(self._stands_for, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Groups don't travel: a pickle or deep copy holds what the user gave.
        return itself, (self._stands_for,)

    def resume_epoch(self, position: Position) -> None:
        """Let the next epoch be the rest of one that was interrupted."""
        self._start, self._begun = position, False

    def epoch_size(self) -> int | None:
        """How many items the sampler has, if it says so."""
        try:
            return len(self._items)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError, AttributeError):
            return None

    def epoch_position(self, batches: int) -> Position | None:
        """Where this epoch is after `batches` batches; `None` if its order isn't known."""
        if self._start is not None:
            order, items, before = self._start.order, self._start.items, self._start.batches
        else:
            order, items, before = self._whole_order(), 0, 0
        if not order:
            return None
        taken = self._deal(len(order) - items).samples_after(batches - before)
        return Position(order=order, items=items + taken, batches=batches)

    def _batches(self, start: Position | None) -> Iterator[Any]:
        # A generator: the user's sampler starts at the first `next`, when it would in one process, and so draws the
        # same random numbers.
        self._order, self._begun = [], True
        size = self.epoch_size()
        if start is not None:
            if start.randomness is not None:
                # Here, since a loader has drawn its workers' seed by now, as it had when the epoch began.
                restore_randomness(start.randomness)
            yield from self._share(list(start.order[start.items :]))
        elif size is None:
            yield from self._stream()
        elif self._exchange.size == 1:
            yield from self._alone(size)
        else:
            yield from self._epoch(size)

    def _epoch(self, size: int) -> Iterator[Any]:
        # Only replica 0 asks the sampler.
        def make() -> list[Any]:
            self._rest = iter(self._items)
            return [size, *itertools.islice(self._rest, size)]

        first_size, *self._order = self._exchange.from_first(make)
        if first_size != size:
            raise ValueError(
                f"The sampler of replica {self._exchange.index} has {size} entries, that of replica 0 has"
                f" {first_size}. All replicas must see the same data set; to load different data on each, use an"
                " IterableDataset that shards itself."
            )
        yield from self._share(self._order)
        # As in one process it is asked once more at the end, since some draw random numbers there.
        next(self._rest, None)

    def _alone(self, size: int) -> Iterator[Any]:
        """With one replica the sampler is asked batch by batch, as ever; the order is noted."""
        self._rest = iter(self._items)
        for start, stop in self._deal(size).spans(0):
            taken = list(itertools.islice(self._rest, stop - start))
            if not taken or (self._drop and len(taken) < stop - start):
                return
            self._order.extend(taken)
            yield taken[0] if self._group is None else taken
        next(self._rest, None)

    def _stream(self) -> Iterator[Any]:
        """For samplers without a length: a round of D batches at a time."""
        iterator = iter(self._items) if self._exchange.index == 0 else iter(())
        wanted = (self._group or 1) * self._exchange.size
        first: list[Any] = []
        while chunk := self._exchange.from_first(lambda: list(itertools.islice(iterator, wanted))):
            first = first or chunk
            yield from self._share(chunk, padding_from=first)
            if len(chunk) < wanted:
                return

    def _share(self, order: list[Any], padding_from: list[Any] | None = None) -> Iterator[Any]:
        shares = self._deal(len(order))
        if shares.padding:
            if not self._training:
                _warn_padded(len(order), self._exchange.size)
            order = order + list(itertools.islice(itertools.cycle(padding_from or order), shares.padding))
        for start, stop in shares.spans(self._exchange.index):
            yield order[start] if self._group is None else order[start:stop]

    def _deal(self, size: int) -> Shares:
        return deal(size, self._group or 1, self._exchange.size, training=self._training, drop_last=self._drop)

    def _whole_order(self) -> list[Any]:
        missing = (self.epoch_size() or 0) - len(self._order)
        if self._exchange.size == 1 and self._order and missing > 0:
            before = capture_randomness()
            ahead = list(itertools.islice(self._rest, missing))
            restore_randomness(before)
            self._rest = itertools.chain(ahead, self._rest)
            return self._order + ahead
        return self._order


def _warn_padded(num_items: int, num_replicas: int) -> None:
    warnings.warn(
        f"There are {num_items} samples (or batches) to evaluate for {num_replicas} replicas. Some are repeated so that"
        " each replica has one, so metrics count them more than once. Use more data or fewer replicas.",
        stacklevel=2,
    )
