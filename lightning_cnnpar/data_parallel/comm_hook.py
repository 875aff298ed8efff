"""How a bucket of gradients is averaged over replicas: one interface for dense and compressed ways, on any device."""

import dataclasses
from typing import Protocol, final

import torch.distributed as dist

from lightning_cnnpar.data_parallel.buckets import Bucket


class Reduction(Protocol):
    """A reduction under way.

    Attributes:
        num_bytes: What this rank gave to the collectives, in bytes.
    """

    num_bytes: int

    def wait(self) -> None:
        """Return when `bucket.flat` holds the sum (on CUDA: in the order of the current stream)."""


class CommHook(Protocol):
    """Averages buckets.

    The reducer calls `reduce` for the buckets in the same order on every rank, during the backward pass and right after
    it, and later waits for each in the same order. Which parameters share a bucket may change between steps, so state
    such as residuals belongs to parameters (`Slot.name`), not to buckets.
    """

    def reduce(self, bucket: Bucket) -> Reduction:
        """Start summing `bucket.flat`, which holds this rank's share of the mean, over `bucket.group`.

        Must not wait for other ranks.
        """


@final
class DenseAllReduce:
    """Averages every gradient as it is."""

    def reduce(self, bucket: Bucket) -> Reduction:
        """Start one all-reduce over the flat tensor."""
        work = dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)
        assert work is not None
        return PendingWork(work, bucket.num_bytes)


@final
class PendingWork:
    """A collective of `torch.distributed` as a `Reduction`."""

    def __init__(self, work: dist.Work, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._work = work

    def wait(self) -> None:
        """Wait for the collective."""
        self._work.wait()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReductionStatistics:
    """Running totals of a reducer; a monitor takes differences between steps.

    Attributes:
        num_rounds: Synchronised backward passes.
        num_bytes: What this rank gave to collectives for gradients.
        num_reductions: Collectives for gradients.
        num_overlapped: Those of them that started before the backward pass had ended.
        num_late: Parameters that got a gradient after their bucket had started, and were reduced once more for it.
        seconds_waited: Time spent waiting for reductions after the backward pass had ended.
    """

    num_rounds: int = 0
    num_bytes: int = 0
    num_reductions: int = 0
    num_overlapped: int = 0
    num_late: int = 0
    seconds_waited: float = 0.0

    def plus(self, **counts: float) -> "ReductionStatistics":
        """These totals with `counts` added."""
        return dataclasses.replace(self, **{name: getattr(self, name) + count for name, count in counts.items()})
