"""Averages gradients over the replicas while the backward pass is still running.

    backward    ─ layer n ─ layer n-1 ─ ... ─ layer 1 ─┬─ end of the outermost pass
                     │ ready     │ ready        │      │ 4. agree on what was touched
    buckets          └──── 0 ────┴───── 1 ──────┘      │ 5. start what is left, then the world's gradients
    network           ▐ all-reduce 0 ▐ all-reduce 1 ▐──┴─ 6. wait, write back

1. `begin_backward` (or the first gradient) opens a *round*. The engine holds it, and calls it when the pass has ended.
2. Each accumulated gradient is marked; once it is *ready* (no more to come in this round) it counts for its bucket.
3. Buckets whose trainable parameters are all ready start, strictly in order.

A gradient that exists only on some replicas counts as zero on the others, so parameters may be unused, frozen and
unfrozen at any time without flags. Gradients are linear, so several rounds before one optimizer step are exact too:
what is averaged already stays what it is when it is averaged again.
"""

import contextlib
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from torch.utils.hooks import RemovableHandle

from lightning_cnnpar._compat import queue_backward_callback
from lightning_cnnpar.config import ConfigurationError
from lightning_cnnpar.data_parallel.accumulation import NamedParameter, after_accumulation, is_trainable_kind
from lightning_cnnpar.data_parallel.agreement import agree, broadcast_order
from lightning_cnnpar.data_parallel.buckets import Bucket, assign_buckets, flat_kind, gradient_bytes
from lightning_cnnpar.data_parallel.comm_hook import CommHook, DenseAllReduce, Reduction, ReductionStatistics
from lightning_cnnpar.data_parallel.shared_gradients import SharedGradients
from lightning_cnnpar.mesh import Mesh

MEBIBYTE = 2**20


@dataclasses.dataclass(eq=False, kw_only=True)
class _Round:
    """One synchronised backward pass. The engine calls it at the end, and drops it when the pass fails.

    Attributes:
        finish: What to do at the end.
        expected: 1 for each parameter that was trainable at the start.
        waiting: By bucket, how many expected parameters aren't ready yet.
        ready: 1 for each parameter whose gradient is final.
        order: Parameters in the order in which they became ready.
        next_bucket: The bucket to start next.
        started: The reductions under way, by bucket, in the order of their start.
        late: Parameters that got a gradient after their bucket had started.
    """

    finish: Callable[["_Round"], None]
    expected: bytes
    waiting: list[int]
    ready: bytearray
    order: list[int] = dataclasses.field(default_factory=list)
    next_bucket: int = 0
    started: dict[int, Reduction] = dataclasses.field(default_factory=dict)
    late: set[int] = dataclasses.field(default_factory=set)

    def __call__(self) -> None:
        self.finish(self)


@final
class GradientReducer:
    """Averages the gradients of this rank's parameters, once for each synchronised backward pass.

    With one replica and nothing in `world_parameters` or `summed_parameters` it does nothing at all.

    Args:
        parameters: This rank's stage; averaged over `mesh.data_group`. The same on all replicas.
        mesh: The grid.
        world_parameters: Parameters outside the network, which every rank holds and computes whole gradients of;
            averaged over the world.
        summed_parameters: Parameters tied between stages, of which every holder computes a part; summed over a replica
            and averaged over replicas. Ranks that don't hold one list its placeholder.
        bucket_bytes: Size of a bucket.
        first_bucket_bytes: Size of the first bucket; small, so that communication starts early.
        hook: How a bucket is averaged. Default: as it is.
    """

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        *,
        mesh: Mesh,
        world_parameters: Sequence[NamedParameter] = (),
        summed_parameters: Sequence[NamedParameter] = (),
        bucket_bytes: int = 25 * MEBIBYTE,
        first_bucket_bytes: int = MEBIBYTE,
        hook: CommHook | None = None,
    ) -> None:
        _refuse_duplicates([*parameters, *world_parameters, *summed_parameters])
        if mesh.pipeline_size == 1:  # a replica is one rank: all three kinds are the same, and overlap as buckets
            parameters = [*parameters, *world_parameters, *summed_parameters]
            world_parameters = summed_parameters = ()
        self._mesh = mesh
        self._hook = DenseAllReduce() if hook is None else hook
        self._limits = (first_bucket_bytes, bucket_bytes)
        self._named = [named for named in parameters if is_trainable_kind(named[1])] if mesh.data_size > 1 else []
        self._shared = SharedGradients(world_parameters, summed_parameters, mesh)
        self._touched = bytearray(len(self._named))
        self._bucket_of = [0] * len(self._named)
        self._buckets: list[Bucket] = []
        known = self._hook.begin(dict(self._named)) if self._named else None
        self._rebuilt = known is not None
        positions = {name: position for position, (name, _) in enumerate(self._named)}
        self._build_buckets(
            [positions[name] for name in known] if known is not None else list(reversed(range(len(self._named))))
        )
        self._round: weakref.ref[_Round] | None = None
        self._in_flight: list[Reduction] = []
        self._counts_as_ready = True
        self._blocked = False
        # Gradients of a CPU and a CUDA part of one network arrive in different threads of the engine.
        self._lock = threading.RLock()
        self._statistics = ReductionStatistics()
        self._handles = list(self._register())
        # A rank that holds none of the shared parameters takes part in reducing them.
        self._active = bool(self._named or len(self._shared))

    @property
    def statistics(self) -> ReductionStatistics:
        """Totals since the start."""
        return self._statistics

    @property
    def order(self) -> list[str]:
        """Names of the parameters in the order in which their gradients are expected."""
        return [slot.name for bucket in self._buckets for slot in bucket.slots]

    def begin_backward(self, passes: int = 1) -> None:
        """Open a round, if none is open, in the backward pass that this thread is in; its end ends the round.

        Code that runs backward passes inside a backward pass calls this first, so that the round covers all of them.
        Gradients count as ready only after `ready_enabled(True)`.

        Args:
            passes: How many passes follow; here, they are reduced together.
        """
        with self._lock:
            if self._active and not self._blocked:
                self._open_round()
                self._counts_as_ready = False

    @contextlib.contextmanager
    def one_round(self) -> Iterator[None]:
        """All backward passes in this context count as one, which ends with it.

        Gradients count as ready only after `ready_enabled(True)`.
        """
        if not self._active or self._blocked:
            yield
            return
        with self._lock:
            self._drain()
            current = self._new_round()
            self._round = weakref.ref(current)
            self._counts_as_ready = False
        try:
            yield
        except BaseException:
            self._round = None
            raise
        self._finish(current)

    def ready_enabled(self, enabled: bool) -> None:
        """Say whether gradients that arrive from now on are final: False for all microbatches but the last."""
        self._counts_as_ready = enabled

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context only accumulate; the next one outside reduces everything."""
        before, self._blocked = self._blocked, True
        try:
            yield
        finally:
            self._blocked = before

    def remove(self) -> None:
        """Take all hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._active = False

    # --- 1 to 3: during the backward pass ---------------------------------------------------------------------------

    def _register(self) -> Iterator[RemovableHandle]:
        def callback(position: int) -> Callable[[], None]:
            return lambda: self._on_accumulated(position)

        for position, named in enumerate(self._named):
            yield after_accumulation(named, callback(position))
        yield from self._shared.register(self._on_shared_accumulated)

    def _on_accumulated(self, position: int) -> None:
        with self._lock:
            self._touched[position] = 1
            if self._blocked:
                return
            try:
                self._mark(self._open_round(), position)
            except BaseException:
                self._round = None  # the traceback would keep it alive
                raise

    def _mark(self, current: _Round, position: int) -> None:
        bucket = self._buckets[self._bucket_of[position]]
        if bucket.index in current.started:
            current.late.add(position)
            return
        if not self._counts_as_ready:
            bucket.unpack_early(position)
            return
        bucket.pack_early(position)
        if not current.ready[position]:
            current.ready[position] = 1
            current.order.append(position)
            if current.expected[position]:
                current.waiting[bucket.index] -= 1
                self._start_ready_buckets(current)

    def _on_shared_accumulated(self) -> None:
        with self._lock:
            if not self._blocked:
                self._open_round()

    def _open_round(self) -> _Round:
        current = self._round() if self._round is not None else None
        if current is not None:
            return current
        self._drain()
        current = self._new_round()
        queue_backward_callback(current)
        # Weak: when the pass fails, the engine drops the round, and the next pass finds none open.
        self._round = weakref.ref(current)
        self._counts_as_ready = True
        return current

    def _new_round(self) -> _Round:
        expected = bytes(parameter.requires_grad for _, parameter in self._named)
        return _Round(
            finish=self._finish,
            expected=expected,
            waiting=[sum(expected[slot.position] for slot in bucket.slots) for bucket in self._buckets],
            ready=bytearray(len(self._named)),
        )

    def _drain(self) -> None:
        # Left over from a pass that failed after it had started reductions: their memory is still in use.
        left, self._in_flight = self._in_flight, []
        for reduction in left:
            reduction.wait()
        if left:
            self._hook.abandon_round()

    def _start_ready_buckets(self, current: _Round) -> None:
        while current.next_bucket < len(self._buckets) and current.waiting[current.next_bucket] == 0:
            bucket = self._buckets[current.next_bucket]
            current.next_bucket += 1
            if _is_expected(bucket, current):
                self._start(bucket, current)
                self._count(num_overlapped=1)

    def _start(self, bucket: Bucket, current: _Round) -> None:
        bucket.pack()
        reduction = self._hook.reduce(bucket)
        current.started[bucket.index] = reduction
        self._in_flight.append(reduction)
        self._count(num_reductions=1, num_bytes=reduction.num_bytes)

    # --- 4 to 6: at the end of the backward pass ----------------------------------------------------------------------

    def _finish(self, current: _Round) -> None:
        self._round = None  # first: if anything below fails, the next pass opens a new round
        begin = time.perf_counter()
        agreed = agree(
            self._mesh,
            [name for name, _ in self._named],
            touched=bytes(self._touched),
            late=bytes(position in current.late for position in range(len(self._named))),
            expected=current.expected,
            shared=self._shared.flags(),
        )
        # What some rank started already comes first, in the same order: a collective that only some ranks reach hangs.
        for bucket in sorted(self._buckets, key=lambda bucket: not _is_expected(bucket, current)):
            if bucket.index not in current.started and any(slot.position in agreed.touched for slot in bucket.slots):
                self._start(bucket, current)
        self._refuse_shared_velocities(agreed.shared)
        self._count(num_bytes=self._shared.start(agreed.shared))
        taken = agreed.touched - agreed.late
        for index, reduction in current.started.items():
            reduction.wait()
            self._buckets[index].unpack(taken)
        self._reduce_again(agreed.late)
        self._shared.finish()
        self._count(seconds_waited=time.perf_counter() - begin)
        self._close(current, agreed.touched, self._named_except(taken))

    def _refuse_shared_velocities(self, agreed: bytes) -> None:
        names = self._shared.touched(agreed) if self._hook.momentum else []
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ConfigurationError(
                f"TopK(momentum={self._hook.momentum}) gives momentum to the parameters of stages, but"
                f" {', '.join(map(repr, names[:5]))}{more} are outside of them or shared between them. Leave momentum"
                " to the optimizer (TopK(momentum=0)), or use pipeline_parallel_size=1."
            )

    def _named_except(self, taken: set[int]) -> set[str]:
        return {name for position, (name, _) in enumerate(self._named) if position not in taken}

    def _reduce_again(self, late: set[int]) -> None:
        # The gradient itself is still the local sum, as results are only written back at the end, so reduce it whole.
        for members in self._assign(sorted(late)):
            bucket = self._bucket(len(self._buckets), members)
            bucket.pack()
            reduction = DenseAllReduce().reduce(bucket)
            reduction.wait()
            bucket.unpack(late)
            self._count(num_reductions=1, num_bytes=reduction.num_bytes, num_late=len(members))

    def _close(self, current: _Round, touched: set[int], unused: set[str]) -> None:
        for position in touched:
            self._touched[position] = 0
        self._in_flight = []
        self._counts_as_ready = True
        self._count(num_rounds=1)
        self._hook.finish_round(unused)
        if not self._rebuilt and self._named:
            self._rebuilt = True
            self._rebuild_buckets(current.order)

    # --- buckets ------------------------------------------------------------------------------------------------------

    def _rebuild_buckets(self, order: list[int]) -> None:
        """Lay the buckets out as the first round went on the first replica."""
        seen = set(order)
        rest = [position for position in reversed(range(len(self._named))) if position not in seen]
        self._build_buckets(broadcast_order(self._mesh, order + rest))

    def _build_buckets(self, order: list[int]) -> None:
        self._buckets = [self._bucket(index, members) for index, members in enumerate(self._assign(order))]
        for bucket in self._buckets:
            for slot in bucket.slots:
                self._bucket_of[slot.position] = bucket.index

    def _assign(self, order: list[int]) -> list[list[int]]:
        parameters = [parameter for _, parameter in self._named]
        first_limit, limit = self._limits
        return assign_buckets(
            order,
            list(map(gradient_bytes, parameters)),
            list(map(flat_kind, parameters)),
            first_limit=first_limit,
            limit=limit,
        )

    def _bucket(self, index: int, members: list[int]) -> Bucket:
        named = [(position, self._named[position]) for position in members]
        return Bucket(index, named, self._mesh.data_group, self._mesh.data_size)

    def _count(self, **counts: Any) -> None:
        self._statistics += ReductionStatistics(**counts)


def _is_expected(bucket: Bucket, current: _Round) -> bool:
    return any(current.expected[slot.position] for slot in bucket.slots)


def _refuse_duplicates(named: Sequence[NamedParameter]) -> None:
    names: dict[int, str] = {}
    for name, parameter in named:
        if id(parameter) in names:
            raise ValueError(
                f"{name!r} and {names[id(parameter)]!r} are the same parameter: give each parameter once, under one"
                f" name, as `Module.named_parameters()` does."
            )
        names[id(parameter)] = name
