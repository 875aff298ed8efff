"""Averages gradients over the replicas, each rank keeping its pieces only.

    backward    ─ layer n ─ ... ─ layer 1 ─┬─ end of a pass ─ ... ─┬─ end of the round
                     │ all of a unit       │ units that are        │ agree on what was touched,
    unit             ▼                     ▼ still missing         ▼ pieces become `parameter.grad`
            pack, drop gradients, reduce-scatter: in the same order on every rank

A *round* is what one backward pass of the user does; it may consist of several passes of autograd, one for each
microbatch of a stage. With stage 1, gradients add up as usual, and units are reduced with the last microbatch of the
last batch before the optimizer's step. With stages 2 and 3 each pass reduces what it made, so that no whole gradient
outlives it.

Every rank reduces every unit that had a trainable parameter when the round began, whether it has gradients for it or
not: ranks with different unused parameters can't get out of step. At most `IN_FLIGHT` units are whole at a time.
"""

import contextlib
import dataclasses
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch.utils.hooks import RemovableHandle

from lightning_cnnpar._compat import queue_backward_callback
from lightning_cnnpar.data_parallel.accumulation import NamedParameter, after_accumulation, before_accumulation
from lightning_cnnpar.data_parallel.agreement import agree
from lightning_cnnpar.data_parallel.comm_hook import CommHook, Reduction, ReductionStatistics
from lightning_cnnpar.data_parallel.held_gradient import HeldGradient
from lightning_cnnpar.data_parallel.sharding import Sharding
from lightning_cnnpar.data_parallel.shards import Slot
from lightning_cnnpar.data_parallel.shared_gradients import SharedGradients
from lightning_cnnpar.data_parallel.unit_gradients import DenseReduceScatter, UnitGradients
from lightning_cnnpar.mesh import Mesh, meet

IN_FLIGHT = 2


@dataclasses.dataclass(eq=False, kw_only=True)
class _Round:
    """One backward pass of the user. The engine calls it at the end, and drops it when the pass fails.

    Attributes:
        finish: What to do at the end.
        expected: 1 for each parameter that was trainable at the start.
        waiting: By unit, how many expected parameters have no gradient of this pass yet.
        ready: 1 for each parameter with a gradient of this pass.
        next_unit: The unit to start next in this pass.
        passes: How many passes have been reduced.
        planned: How many passes will be, on the rank with the most of them.
        late: Parameters that got a gradient when their unit had started.
    """

    finish: Callable[["_Round"], None]
    expected: bytes
    waiting: list[int]
    ready: bytearray
    next_unit: int = 0
    passes: int = 0
    planned: int = 0
    late: set[int] = dataclasses.field(default_factory=set)

    def __call__(self) -> None:
        self.finish(self)


@final
class ShardedReducer:
    """Averages the gradients of a stage whose parameters are cut over replicas.

    Has the methods of `GradientReducer`.

    Args:
        sharding: The units.
        mesh: The grid.
        world_parameters: As for `GradientReducer`: whole on every rank of the world.
        summed_parameters: As for `GradientReducer`: tied between stages.
        hook: How a unit is summed, if not as it is. Units are then reduced as with stage 1, once for each step: what
            compression leaves out belongs to a step.
    """

    def __init__(
        self,
        sharding: Sharding,
        *,
        mesh: Mesh,
        world_parameters: Sequence[NamedParameter] = (),
        summed_parameters: Sequence[NamedParameter] = (),
        hook: CommHook | None = None,
    ) -> None:
        self._sharding, self._mesh, self._hook = sharding, mesh, hook
        self._dense = DenseReduceScatter()
        self._each_pass = sharding.stage > 1 and hook is None
        self._slots: list[Slot] = [slot for unit in sharding.units for slot in unit.slots]
        self._unit_of = [index for index, unit in enumerate(sharding.units) for _ in unit.slots]
        self._positions: list[list[int]] = [[] for _ in sharding.units]
        for position, index in enumerate(self._unit_of):
            self._positions[index].append(position)
        if hook is not None and self._slots:
            hook.begin({slot.name: slot.parameter for slot in self._slots})
        self._shared = SharedGradients(world_parameters, summed_parameters, mesh)
        self._touched = bytearray(len(self._slots))
        self._round: weakref.ref[_Round] | None = None
        self._in_flight: deque[tuple[UnitGradients, Reduction]] = deque()
        self._counts_as_ready = True
        self._blocked = False
        self._flush_queued = False
        self._lock = threading.RLock()
        self._statistics = ReductionStatistics()
        self._handles = list(self._register())

    @property
    def statistics(self) -> ReductionStatistics:
        """Totals since the start."""
        return self._statistics

    @property
    def order(self) -> list[str]:
        """Names of the parameters in the order in which their gradients are expected."""
        return [slot.name for slot in self._slots]

    def begin_backward(self, passes: int = 1) -> None:
        """Open a round, if none is open, in the backward pass that this thread is in; its end ends the round.

        Args:
            passes: How many passes of autograd follow for this rank, inside of the present one.
        """
        with self._lock:
            if not self._is_blocked:
                current = self._open_round()
                current.planned += max(self._everywhere(passes)) if self._each_pass else 0
                self._counts_as_ready = False

    @contextlib.contextmanager
    def one_round(self) -> Iterator[None]:
        """All backward passes in this context count as one round, which ends with it.

        Gradients count as ready only after `ready_enabled(True)`.
        """
        if self._is_blocked:
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
        """Backward passes in this context are not the last ones before a step: with stage 1 they only accumulate."""
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

    @property
    def _is_blocked(self) -> bool:
        # Parameters outside of the units only accumulate in `no_sync`, whatever the stage.
        return self._blocked and not self._each_pass

    # --- during the backward pass -------------------------------------------------------------------------------------

    def _register(self) -> Iterator[RemovableHandle]:
        def before(slot: Slot) -> Callable[[], None]:
            return lambda: self._before(slot)

        def after(position: int) -> Callable[[], None]:
            return lambda: self._on_accumulated(position)

        for position, slot in enumerate(self._slots):
            yield before_accumulation((slot.name, slot.parameter), before(slot))
            yield after_accumulation((slot.name, slot.parameter), after(position))
        yield from self._shared.register(self._on_shared_accumulated)

    def _before(self, slot: Slot) -> None:
        # Autograd adds to what is there; pieces that are there are added to apart.
        if slot.gradient is not None:
            if isinstance(slot.parameter.grad, HeldGradient):
                slot.parameter.grad = None
                slot.kept = True
            elif not slot.kept:
                slot.gradient = None  # it has been zeroed

    def _on_accumulated(self, position: int) -> None:
        with self._lock:
            self._touched[position] = 1
            if self._is_blocked:
                return
            try:
                self._mark(self._open_round(), position)
            except BaseException:
                self._round = None  # the traceback would keep it alive
                raise

    def _mark(self, current: _Round, position: int) -> None:
        index = self._unit_of[position]
        if self._each_pass and not self._flush_queued:
            self._flush_queued = True
            queue_backward_callback(self._end_of_pass)
        if index < current.next_unit or not current.expected[position]:
            current.late.add(position)
            return
        if (self._each_pass or self._counts_as_ready) and not current.ready[position]:
            current.ready[position] = 1
            current.waiting[index] -= 1
            self._start_ready_units(current)

    def _on_shared_accumulated(self) -> None:
        with self._lock:
            if not self._is_blocked:
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
        return current

    def _new_round(self) -> _Round:
        self._flush_queued = False
        self._counts_as_ready = True
        for slot in self._slots:
            slot.arrived = None  # of a pass that failed
        expected = bytes(slot.parameter.requires_grad for slot in self._slots)
        # Before anything is reduced, as what is reduced follows from it.
        agree(
            self._mesh,
            self.order,
            touched=bytes(len(expected)),
            late=bytes(len(expected)),
            expected=expected,
            shared=b"",
        )
        current = _Round(finish=self._finish, expected=expected, waiting=[], ready=bytearray(len(expected)))
        self._begin_pass(current)
        return current

    def _begin_pass(self, current: _Round) -> None:
        current.ready[:] = bytes(len(current.ready))
        current.waiting = [sum(current.expected[p] for p in positions) for positions in self._positions]
        current.next_unit = 0

    def _drain(self) -> None:
        # Left over from a pass that failed after it had started reductions: their memory is still in use.
        while self._in_flight:
            self._in_flight.popleft()[1].wait()

    def _start_ready_units(self, current: _Round) -> None:
        while current.next_unit < len(self._positions) and current.waiting[current.next_unit] == 0:
            self._start_next(current)
            self._count(num_overlapped=1)

    def _start_next(self, current: _Round) -> None:
        index = current.next_unit
        current.next_unit += 1
        if any(current.expected[position] for position in self._positions[index]):
            self._start(index)

    def _start(self, index: int, hook: "CommHook | DenseReduceScatter | None" = None) -> None:
        while len(self._in_flight) >= IN_FLIGHT:
            self._land()
        gradients = UnitGradients(index, self._sharding.units[index], self._positions[index], self._mesh.data_size)
        chosen: CommHook | DenseReduceScatter = hook or self._hook or self._dense
        reduction = chosen.reduce(gradients)  # type: ignore[arg-type]  # what hooks need of a bucket, it has
        self._in_flight.append((gradients, reduction))
        self._count(num_reductions=1, num_bytes=reduction.num_bytes)

    @torch.no_grad()
    def _land(self) -> None:
        gradients, reduction = self._in_flight.popleft()
        begin = time.perf_counter()
        reduction.wait()
        self._count(seconds_waited=time.perf_counter() - begin)
        unit = gradients.unit
        own = unit.own_part(gradients.flat).clone() if gradients.own is None else gradients.own
        for slot in unit.slots:
            start, stop = slot.span
            begin_at = slot.offset + start - unit.rank * unit.share
            arrived = own[begin_at : begin_at + stop - start] if stop > start else own.new_empty(0)
            slot.arrived = arrived if slot.arrived is None else slot.arrived.add_(arrived)

    # --- at the end of a pass, and of a round -------------------------------------------------------------------------

    def _end_of_pass(self) -> None:
        current = self._round() if self._round is not None else None
        if current is not None and self._flush_queued:
            self._flush(current)

    def _flush(self, current: _Round) -> None:
        """Reduce what is left of a pass."""
        self._flush_queued = False
        while current.next_unit < len(self._positions):
            self._start_next(current)
        while self._in_flight:
            self._land()
        current.passes += 1
        self._begin_pass(current)

    def _finish(self, current: _Round) -> None:
        self._round = None  # first: if anything below fails, the next pass opens a new round
        if self._flush_queued or not self._each_pass or (not current.planned and not current.passes):
            self._flush(current)
        while current.passes < current.planned:
            self._flush(current)
        agreed = agree(
            self._mesh,
            self.order,
            touched=bytes(self._touched),
            late=bytes(self._is_left(position, current) for position in range(len(self._slots))),
            expected=current.expected,
            shared=self._shared.flags() if not self._blocked else b"",
        )
        begin = time.perf_counter()
        if not self._blocked:
            self._count(num_bytes=self._shared.start(agreed.shared))
        for index in sorted({self._unit_of[position] for position in agreed.late}):
            self._start(index, self._dense)
            self._count(num_late=1)
        while self._in_flight:
            self._land()
        if not self._blocked:
            self._shared.finish()
        self._commit(agreed.touched)
        self._count(num_rounds=1, seconds_waited=time.perf_counter() - begin)
        self._counts_as_ready = True
        if self._hook is not None:
            unused = [
                slot.name
                for position, slot in enumerate(self._slots)
                if position not in agreed.touched or position in agreed.late
            ]
            self._hook.finish_round(unused)

    def _is_left(self, position: int, current: _Round) -> bool:
        """Whether a gradient has come too late for its unit, or was there when the whole unit was frozen."""
        expected = any(current.expected[p] for p in self._positions[self._unit_of[position]])
        return position in current.late or bool(self._touched[position] and not expected)

    @torch.no_grad()
    def _commit(self, touched: set[int]) -> None:
        """Give the pieces to the optimizer; what no replica touched gets no gradient."""
        for position, slot in enumerate(self._slots):
            arrived, slot.arrived = slot.arrived, None
            if position not in touched or arrived is None:
                # Not touched anywhere: whoever zeroed its gradient since is seen by `to_pieces`.
                continue
            held = isinstance(slot.parameter.grad, HeldGradient) or slot.kept
            slot.gradient = slot.gradient.add_(arrived) if slot.gradient is not None and held else arrived
            slot.parameter.grad = HeldGradient.of(slot)
            slot.kept = False
            self._touched[position] = 0
        self._sharding.to_pieces()

    def _everywhere(self, number: int) -> list[int]:
        rows = meet(self._mesh, "begins a backward pass", number.to_bytes(4, "little"))
        return [int.from_bytes(row, "little") for row in rows]

    def _count(self, **counts: Any) -> None:
        self._statistics += ReductionStatistics(**counts)
