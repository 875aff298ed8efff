"""Schedules: in which order each rank runs the stages of its microbatches.

A schedule is a pure function from the placement of the stages to one table of actions per rank. The executor runs any
table; a new schedule only adds a function here. Time goes to the right, P = 3 ranks, M = 4 microbatches.

GPipe (Huang et al., 2019, arXiv:1811.06965): all microbatches are alive when the loss is computed.

    rank 0   F0 F1 F2 F3                         B3 B2 B1 B0
    rank 1      F0 F1 F2 F3                   B3 B2 B1 B0
    rank 2         F0 F1 F2 F3 | loss |    B3 B2 B1 B0

1F1B (Narayanan et al., 2019, PipeDream; its flush in 2021, arXiv:2104.04473): P - p microbatches alive on rank p, the
bubble of GPipe.

    rank 0   F0 F1 F2             B0 F3       B1    B2    B3
    rank 1      F0 F1       B0 F2    B1 F3    B2    B3
    rank 2         F0 B0 F1    B1 F2    B2 F3    B3

Interleaved 1F1B (the same, 2021): V stages a rank, stage s on rank s mod P; the bubble is V times smaller, V times as
much travels. P = 2, V = 2, M = 2, stages 0 and 2 on rank 0:

    rank 0   F0.0 F0.1 F2.0 F2.1      B2.0 B2.1      B0.0 B0.1
    rank 1        F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1

Zero bubble (Qi et al., 2023, arXiv:2401.10241, ZB-H1): a backward is split in I, the gradient of the input, which the
rank before waits for, and W, the gradients of the weights, which nobody waits for and which fill what 1F1B leaves idle.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

Kind = Literal["F", "B", "I", "W"]
StepSchedule = Literal["1f1b", "interleaved_1f1b", "zero_bubble"]


@dataclasses.dataclass(frozen=True)
class Action:
    """One step of a rank.

    Attributes:
        kind: "F" for forward, "B" for backward; "I" and "W" for the halves of a backward, the gradients of the stage's
            input and those of its weights.
        stage: Position of the stage in topological order.
        microbatch: Which microbatch, from 0.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


Actions = tuple[Action, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """What one rank does in one network call.

    Attributes:
        forward: Actions of the call itself.
        backward: Actions of the backward pass through it.
    """

    forward: Actions
    backward: Actions


# ---- one call for the whole batch ------------------------------------------------------------------------------------


def gpipe(stage_ranks: Sequence[int], rank: int, num_microbatches: int) -> Table:
    """All forward passes, then all backward passes; the last microbatch first, whose activations are still in caches.

    Args:
        stage_ranks: Pipeline rank of each stage, in topological order. A rank may hold any number of stages, and they
            need not be neighbours.
        rank: Whose table.
        num_microbatches: At least 1.
    """
    return _gpipe(tuple(stage_ranks), rank, num_microbatches)


@functools.lru_cache(maxsize=1024)
def _gpipe(stage_ranks: tuple[int, ...], rank: int, num_microbatches: int) -> Table:
    runs = _runs(stage_ranks, rank)
    microbatches = range(num_microbatches)
    forward = [Action("F", stage, m) for run in runs for m in microbatches for stage in run]
    backward = [
        Action("B", stage, m) for run in reversed(runs) for m in reversed(microbatches) for stage in reversed(run)
    ]
    return Table(forward=tuple(forward), backward=tuple(backward))


def _runs(stage_ranks: Sequence[int], rank: int) -> list[list[int]]:
    """The stages of `rank`, neighbours together.

    Neighbours run one after the other for each microbatch, so that the next rank gets its first input early; stages
    with other ranks in between run for all microbatches first, while the others fill up.
    """
    runs: list[list[int]] = []
    for stage, owner in enumerate(stage_ranks):
        if owner != rank:
            continue
        if runs and runs[-1][-1] == stage - 1:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return runs


# ---- one step for each microbatch ------------------------------------------------------------------------------------


def step_tables(
    schedule: StepSchedule, stage_ranks: Sequence[int], num_ranks: int, num_microbatches: int
) -> tuple[Actions, ...]:
    """The actions of each rank, forward and backward in one sequence.

    Stages that go round the ranks (0, 1, ... P - 1, 0, 1, ...) follow the published tables. Any other placement, and
    interleaved stages whose microbatches don't divide into rounds, get a table by list scheduling.

    Args:
        schedule: Which one.
        stage_ranks: Pipeline rank of each stage, in topological order.
        num_ranks: P.
        num_microbatches: M, at least 1.
    """
    return _step_tables(schedule, tuple(stage_ranks), num_ranks, num_microbatches)


@functools.lru_cache(maxsize=256)
def _step_tables(
    schedule: StepSchedule, stage_ranks: tuple[int, ...], num_ranks: int, num_microbatches: int
) -> tuple[Actions, ...]:
    rounds = _Rounds.of(stage_ranks, num_ranks, num_microbatches)
    split = schedule == "zero_bubble"
    if rounds is None or (schedule == "1f1b" and rounds.stages_per_rank > 1):
        return list_schedule(stage_ranks, num_ranks, num_microbatches, split=split)
    return tuple(tuple(rounds.zero_bubble(p) if split else rounds.one_f_one_b(p)) for p in range(num_ranks))


@dataclasses.dataclass(frozen=True)
class _Rounds:
    """Stages that go round the ranks.

    Microbatches pass in groups through the first stages of all ranks, then through the second ones, and so on.
    """

    num_ranks: int
    stages_per_rank: int
    num_microbatches: int
    group: int

    @classmethod
    def of(cls, stage_ranks: Sequence[int], num_ranks: int, num_microbatches: int) -> "_Rounds | None":
        stages_per_rank, rest = divmod(len(stage_ranks), num_ranks)
        if rest or list(stage_ranks) != list(range(num_ranks)) * stages_per_rank:
            return None
        groups = max(1, num_microbatches // num_ranks)
        if stages_per_rank > 1 and num_microbatches % groups:
            return None
        return cls(num_ranks, stages_per_rank, num_microbatches, num_microbatches // groups)

    def one_f_one_b(self, rank: int) -> Iterable[Action]:
        # With several stages the gradient's way back is longer by a rank for each rank that is left.
        late = 2 if self.stages_per_rank > 1 else 1
        warm_up, total = self._warm_up(rank, late), self._total
        forward, backward = self._order(rank, "F"), self._order(rank, "B")
        yield from forward[:warm_up]
        for i in range(warm_up, total):
            yield forward[i]
            yield backward[i - warm_up]
        yield from backward[total - warm_up :]

    def zero_bubble(self, rank: int) -> Iterable[Action]:
        warm_up, total = self._warm_up(rank, 1), self._total
        forward, inputs, weights = (self._order(rank, kind) for kind in ("F", "I", "W"))
        yield from forward[:warm_up]
        for i in range(total):
            if warm_up + i < total:
                yield forward[warm_up + i]
            yield inputs[i]
            # As many weight gradients wait as there are ranks before: the memory of 1F1B's first rank everywhere.
            if i >= rank:
                yield weights[i - rank]
        yield from weights[max(0, total - rank) :]

    @property
    def _total(self) -> int:
        return self.stages_per_rank * self.num_microbatches

    def _warm_up(self, rank: int, late: int) -> int:
        """Forward passes before the first backward's partner."""
        return min(self._total, (self.stages_per_rank - 1) * self.group + late * (self.num_ranks - 1 - rank))

    def _order(self, rank: int, kind: Kind) -> list[Action]:
        chunks = range(self.stages_per_rank) if kind == "F" else reversed(range(self.stages_per_rank))
        stages = [chunk * self.num_ranks + rank for chunk in chunks]
        return [
            Action(kind, stage, m)
            for first in range(0, self.num_microbatches, self.group)
            for stage in stages
            for m in range(first, min(first + self.group, self.num_microbatches))
        ]


def list_schedule(
    stage_ranks: Sequence[int], num_ranks: int, num_microbatches: int, *, split: bool = False
) -> tuple[Actions, ...]:
    """A table for any placement, by list scheduling: whoever is free first takes the most urgent action that can run.

    Gradients of inputs come first, then forward passes of the oldest microbatch, then gradients of weights. Each stage
    is taken to read the one before, forwards to last 1, backwards 2 (halves: 1 each). No more microbatches are under
    way than there are stages, so memory is bounded as in 1F1B, and a microbatch that has begun is never held up.

    Args:
        stage_ranks: Pipeline rank of each stage.
        num_ranks: P.
        num_microbatches: M.
        split: Split backwards into I and W.
    """
    return _ListScheduler(stage_ranks, num_ranks, num_microbatches, split).run()


class _ListScheduler:
    def __init__(self, stage_ranks: Sequence[int], num_ranks: int, num_microbatches: int, split: bool) -> None:
        self._stage_ranks, self._num_microbatches, self._split = list(stage_ranks), num_microbatches, split
        self._tables: list[list[Action]] = [[] for _ in range(num_ranks)]
        self._clocks = [0.0] * num_ranks
        self._ends: dict[Action, float] = {}
        self._last = len(self._stage_ranks) - 1
        self._back: Kind = "I" if split else "B"
        self._duration = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
        # Next microbatch of each stage, by kind: microbatches keep their order on every stage.
        self._next: dict[str, list[int]] = collections.defaultdict(lambda: [0] * len(self._stage_ranks))

    def run(self) -> tuple[Actions, ...]:
        kinds: list[Kind] = ["F", "I", "W"] if self._split else ["F", "B"]
        remaining = len(kinds) * len(self._stage_ranks) * self._num_microbatches
        while remaining:
            # The action that can start first; among those, the most urgent one.
            best = min((self._urgency(action) for action in self._candidates(kinds)), key=lambda entry: entry[:-1])
            start, action = best[0], best[-1]
            rank = self._stage_ranks[action.stage]
            self._tables[rank].append(action)
            self._clocks[rank] = self._ends[action] = start + self._duration[action.kind]
            self._next[action.kind][action.stage] += 1
            remaining -= 1
        return tuple(map(tuple, self._tables))

    def _candidates(self, kinds: Sequence[Kind]) -> Iterable[Action]:
        for kind in kinds:
            for stage, m in enumerate(self._next[kind]):
                action = Action(kind, stage, m)
                if m < self._num_microbatches and all(need in self._ends for need in self._needs(action)):
                    yield action

    def _needs(self, action: Action) -> list[Action]:
        stage, m = action.stage, action.microbatch
        if action.kind == "W":
            return [Action("I", stage, m)]
        if action.kind != "F":
            return [Action("F", stage, m), *([Action(self._back, stage + 1, m)] if stage < self._last else [])]
        if stage > 0:
            return [Action("F", stage - 1, m)]
        # As many microbatches are under way as there are stages.
        oldest = m - len(self._stage_ranks)
        last: Kind = "W" if self._split else "B"
        return [Action(last, other, oldest) for other in range(len(self._stage_ranks))] if oldest >= 0 else []

    def _urgency(self, action: Action) -> tuple[float, int, int, int, Action]:
        start = max([self._clocks[self._stage_ranks[action.stage]], *(self._ends[n] for n in self._needs(action))])
        return start, {"B": 0, "I": 0, "F": 1, "W": 2}[action.kind], action.microbatch, -action.stage, action


def render(tables: Sequence[Sequence[Action]], start: Callable[[int, Action], float], *, width: int) -> str:
    """Tables as a picture, one line a rank, `width` characters a unit of time.

    Args:
        tables: The actions of each rank.
        start: When an action of a rank starts, such as from `simulate`.
        width: Characters for a unit.
    """
    lines = []
    for rank, table in enumerate(tables):
        line = ""
        for action in table:
            line = line.ljust(round(start(rank, action) * width)) + f"{action} "
        lines.append(f"rank {rank}   {line.rstrip()}")
    return "\n".join(lines)
