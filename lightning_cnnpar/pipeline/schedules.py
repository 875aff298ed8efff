"""Schedules: in which order each rank runs the stages of its microbatches.

A schedule is a pure function from the placement of the stages to one table of actions per rank. The executor runs any
table; a new schedule only adds a function here. GPipe with three ranks and four microbatches, time to the right:

    rank 0   F0 F1 F2 F3                         B3 B2 B1 B0
    rank 1      F0 F1 F2 F3                   B3 B2 B1 B0
    rank 2         F0 F1 F2 F3 | loss |    B3 B2 B1 B0

The backward pass starts with the last microbatch: its activations are the ones still in the caches.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

Kind = Literal["F", "B"]


@dataclasses.dataclass(frozen=True)
class Action:
    """One step of a rank.

    Attributes:
        kind: "F" for forward, "B" for backward.
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


def gpipe(stage_ranks: Sequence[int], rank: int, num_microbatches: int) -> Table:
    """All forward passes, then all backward passes (Huang et al., GPipe, 2019).

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
