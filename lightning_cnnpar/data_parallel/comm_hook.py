"""How a bucket of gradients is averaged over replicas: one interface for dense and compressed ways, on any device."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, final

import torch.distributed as dist
from torch import nn

from lightning_cnnpar.compression import CompressionEngine, Part
from lightning_cnnpar.data_parallel.buckets import Bucket, real_numel
from lightning_cnnpar.metrics import Totals


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

    Attributes:
        momentum: If not 0, sums are not of gradients but of velocities with this momentum.
    """

    momentum: float

    def reduce(self, bucket: Bucket) -> Reduction:
        """Start summing `bucket.flat`, which holds this rank's share of the mean, over `bucket.group`.

        Must not wait for other ranks.
        """

    def finish_round(self, unused: Collection[str]) -> None:
        """All buckets of a backward pass have been waited for.

        Args:
            unused: Parameters whose sums were not taken: no replica had a gradient, or one came late and was averaged
                once more. The same on all ranks.
        """

    def abandon_round(self) -> None:
        """The backward pass failed after some buckets had started; they have been waited for, and nothing was taken."""

    def begin(self, parameters: Mapping[str, nn.Parameter]) -> Sequence[str] | None:
        """A reducer starts to use this hook.

        Args:
            parameters: Its parameters by name.

        Returns:
            The order of readiness that buckets follow from the first pass on; `None` to find it in the first pass.
        """


@final
class DenseAllReduce:
    """Averages every gradient as it is."""

    momentum = 0.0

    def reduce(self, bucket: Bucket) -> Reduction:
        """Start one all-reduce over the flat tensor."""
        work = dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)
        assert work is not None
        return PendingWork(work, bucket.num_bytes)

    def finish_round(self, unused: Collection[str]) -> None:
        """Nothing is kept between passes."""

    def abandon_round(self) -> None:
        """Nothing is kept between passes."""

    def begin(self, parameters: Mapping[str, nn.Parameter]) -> Sequence[str] | None:
        """Every pass is like the first."""
        return None


@final
class CompressedReduce:
    """Averages gradients that are compressed on their way.

    Args:
        engine: Compresses and sums.
    """

    def __init__(self, engine: CompressionEngine) -> None:
        self.engine = engine
        self.momentum = engine.momentum
        self._order: Sequence[str] = ()

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a checkpoint: that of the engine, and the `order` of readiness."""
        self.engine.load_state(state)
        self._order = state["order"]

    def reduce(self, bucket: Bucket) -> Reduction:
        """Start to sum a bucket."""
        return self.engine.start(bucket.index, [_part(bucket, slot) for slot in bucket.slots])

    def finish_round(self, unused: Collection[str]) -> None:
        """A step is complete."""
        self.engine.finish_step(unused)

    def abandon_round(self) -> None:
        """A step was given up."""
        self.engine.abandon_step()

    def begin(self, parameters: Mapping[str, nn.Parameter]) -> Sequence[str] | None:
        """Take over what belongs to these parameters of a checkpoint."""
        self.engine.take_up(parameters)
        own = [name for name in self._order if name in parameters]
        return own if len(own) == len(parameters) else None


def _part(bucket: Bucket, slot: Any) -> Part:
    numel = real_numel(slot.parameter)
    shape = tuple(slot.parameter.shape)
    # Of complex numbers, the real and imaginary parts have no shape that means anything to a compressor.
    shape = shape if numel == slot.parameter.numel() else (numel,)
    return Part(slot.name, bucket.flat[slot.offset : slot.offset + numel], shape)


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
class ReductionStatistics(Totals):
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
