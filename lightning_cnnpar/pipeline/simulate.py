"""Runs action tables on paper: finds deadlocks and says how long ranks idle and how much they keep.

The clock is exact for the durations given, transfers take no time, and a rank runs its actions in order, each as soon
as what it needs is there:

    F(s, m)   needs F(t, m) of every stage t that s receives from
    B(s, m)   needs F(s, m) and B(t, m) of every stage t that receives from s
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from lightning_cnnpar.pipeline.schedules import Action

Duration = Callable[[Action], float]


class DeadlockError(ValueError):
    """A set of tables in which no rank can go on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """How a set of tables would run.

    Attributes:
        spans: Start and end of each action, by rank.
        makespan: When the last action ends.
        bubble: Share of the ranks' time in which they idle, in [0, 1).
        in_flight: By rank: the most microbatches whose activations are kept at once, summed over its stages.
    """

    spans: Sequence[Mapping[Action, tuple[float, float]]]
    makespan: float
    bubble: float
    in_flight: Sequence[int]


def simulate(
    tables: Sequence[Sequence[Action]], sources: Mapping[int, Sequence[int]], duration: Duration | None = None
) -> Simulation:
    """Run tables on paper.

    Args:
        tables: The actions of each rank, in order; forward and backward in one sequence.
        sources: For each stage, the earlier stages that it receives values from.
        duration: How long an action takes; 1 for a forward and 2 for a backward by default.

    Raises:
        DeadlockError: If the ranks wait for each other, or for an action that no table has; it says where each stands.
    """
    duration = duration or (lambda action: 1.0 if action.kind == "F" else 2.0)
    needs = _needs(sources)
    ends: dict[Action, float] = {}
    spans: list[dict[Action, tuple[float, float]]] = [{} for _ in tables]
    clocks = [0.0] * len(tables)
    positions = [0] * len(tables)
    while any(position < len(table) for position, table in zip(positions, tables, strict=True)):
        before = list(positions)
        for rank, table in enumerate(tables):
            while positions[rank] < len(table) and all(need in ends for need in needs(table[positions[rank]])):
                action = table[positions[rank]]
                start = max([clocks[rank], *(ends[need] for need in needs(action))])
                clocks[rank] = ends[action] = start + duration(action)
                spans[rank][action] = (start, ends[action])
                positions[rank] += 1
        if positions == before:
            raise DeadlockError(_describe(tables, positions, needs, ends))
    makespan = max(clocks, default=0.0)
    busy = sum(end - start for span in spans for start, end in span.values())
    idle = 1 - busy / (makespan * len(tables)) if makespan else 0.0
    return Simulation(
        spans=spans, makespan=makespan, bubble=max(idle, 0.0), in_flight=[_in_flight(table) for table in tables]
    )


def chain(num_stages: int) -> dict[int, list[int]]:
    """The `sources` of stages in a row."""
    return {stage: [stage - 1] if stage else [] for stage in range(num_stages)}


def ideal_bubble(num_ranks: int, num_microbatches: int) -> float:
    """Idle share of GPipe over equal stages, (P - 1) / (M + P - 1)."""
    return (num_ranks - 1) / (num_microbatches + num_ranks - 1)


def _needs(sources: Mapping[int, Sequence[int]]) -> Callable[[Action], list[Action]]:
    targets: dict[int, list[int]] = {}
    for stage, earlier in sources.items():
        for source in earlier:
            targets.setdefault(source, []).append(stage)

    def needs(action: Action) -> list[Action]:
        stage, m = action.stage, action.microbatch
        if action.kind == "F":
            return [Action("F", source, m) for source in sources.get(stage, ())]
        return [Action("F", stage, m), *(Action("B", target, m) for target in targets.get(stage, ()))]

    return needs


def _in_flight(table: Sequence[Action]) -> int:
    kept = most = 0
    for action in table:
        kept += 1 if action.kind == "F" else -1
        most = max(most, kept)
    return most


def _describe(
    tables: Sequence[Sequence[Action]],
    positions: Sequence[int],
    needs: Callable[[Action], list[Action]],
    ends: Mapping[Action, float],
) -> str:
    lines = []
    for rank, (table, position) in enumerate(zip(tables, positions, strict=True)):
        if position < len(table):
            missing = ", ".join(str(need) for need in needs(table[position]) if need not in ends)
            lines.append(f"rank {rank} is at {table[position]} and waits for {missing}")
    return "These tables never end: " + "; ".join(lines) + "."
