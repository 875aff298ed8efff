"""Runs action tables on paper: finds deadlocks, and says how long ranks idle, how much they keep and what travels.

The clock is exact for the durations given. A rank runs its actions in order, each as soon as what it needs is there:

    F(s, m)          needs F(t, m) of every stage t that s receives from
    B(s, m), I(s, m) need F(s, m), the same of every stage that receives from s, and F(o, m) of every stage o that makes
                     an output: without it there is no loss
    W(s, m)          needs I(s, m)
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from lightning_cnnpar.pipeline.schedules import Action, Kind

Duration = Callable[[Action], float]
Delay = Callable[[int, int], float]
_UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


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
        peak_bytes: By rank: the most bytes of activations kept at once; zeros where no sizes were given.
    """

    spans: Sequence[Mapping[Action, tuple[float, float]]]
    makespan: float
    bubble: float
    in_flight: Sequence[int]
    peak_bytes: Sequence[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes that one microbatch of a stage keeps for its backward.

    Attributes:
        forward: After its forward.
        weights: Of those, what is still kept between I and W.
        computing: More than that while its backward runs, such as what is computed again.
    """

    forward: float
    weights: float = 0.0
    computing: float = 0.0


def simulate(
    tables: Sequence[Sequence[Action]],
    sources: Mapping[int, Sequence[int]],
    duration: Duration | None = None,
    *,
    outputs: Sequence[int] = (),
    delay: Delay = lambda source, target: 0.0,
    kept: Mapping[int, Kept] | None = None,
) -> Simulation:
    """Run tables on paper.

    Args:
        tables: The actions of each rank, in order; forward and backward in one sequence.
        sources: For each stage, the earlier stages that it receives values from.
        duration: How long an action takes; by default 1 for a forward, 2 for a backward, 1 for each half of one.
        outputs: Stages that make outputs of the network.
        delay: How long a transfer from one stage to another takes, for stages on different ranks.
        kept: What a microbatch of each stage keeps.

    Raises:
        DeadlockError: If the ranks wait for each other, or for an action that no table has; it says where each stands.
    """
    duration = duration or (lambda action: _UNITS[action.kind])
    rank_of = {action.stage: rank for rank, table in enumerate(tables) for action in table}
    backward: Kind = "I" if any(action.kind == "I" for table in tables for action in table) else "B"
    needs = _needs(sources, outputs, backward)
    ends: dict[Action, float] = {}

    def arrival(need: Action, action: Action) -> float:
        far = rank_of[need.stage] != rank_of[action.stage]
        return ends[need] + (delay(need.stage, action.stage) if far else 0.0)

    spans: list[dict[Action, tuple[float, float]]] = [{} for _ in tables]
    clocks = [0.0] * len(tables)
    positions = [0] * len(tables)
    while any(position < len(table) for position, table in zip(positions, tables, strict=True)):
        before = list(positions)
        for rank, table in enumerate(tables):
            while positions[rank] < len(table) and all(need in ends for need in needs(table[positions[rank]])):
                action = table[positions[rank]]
                start = max([clocks[rank], *(arrival(need, action) for need in needs(action))])
                clocks[rank] = ends[action] = start + duration(action)
                spans[rank][action] = (start, ends[action])
                positions[rank] += 1
        if positions == before:
            raise DeadlockError(_describe(tables, positions, needs, ends))
    makespan = max(clocks, default=0.0)
    busy = sum(end - start for span in spans for start, end in span.values())
    idle = 1 - busy / (makespan * len(tables)) if makespan else 0.0
    return Simulation(
        spans=spans,
        makespan=makespan,
        bubble=max(idle, 0.0),
        in_flight=[int(_peak(table, dict.fromkeys(rank_of, Kept(forward=1, weights=1)))) for table in tables],
        peak_bytes=[_peak(table, kept) if kept else 0.0 for table in tables],
    )


def link_bytes(
    stage_ranks: Sequence[int], edges: Mapping[tuple[int, int], float], num_microbatches: int, *, training: bool = True
) -> dict[tuple[int, int], float]:
    """Bytes of activations and gradients from rank to rank in one step.

    Args:
        stage_ranks: Pipeline rank of each stage.
        edges: Bytes of one microbatch from a stage to a later one.
        num_microbatches: M.
        training: Whether gradients come back.
    """
    totals: dict[tuple[int, int], float] = {}
    for (source, target), size in edges.items():
        pair = (stage_ranks[source], stage_ranks[target])
        if pair[0] == pair[1]:
            continue
        for way in (pair, pair[::-1]) if training else (pair,):
            totals[way] = totals.get(way, 0.0) + size * num_microbatches
    return totals


def chain(num_stages: int) -> dict[int, list[int]]:
    """The `sources` of stages in a row."""
    return {stage: [stage - 1] if stage else [] for stage in range(num_stages)}


def ideal_bubble(num_ranks: int, num_microbatches: int) -> float:
    """Idle share of GPipe over equal stages, (P - 1) / (M + P - 1)."""
    return (num_ranks - 1) / (num_microbatches + num_ranks - 1)


def _needs(
    sources: Mapping[int, Sequence[int]], outputs: Sequence[int], backward: Kind
) -> Callable[[Action], list[Action]]:
    targets: dict[int, list[int]] = {}
    for stage, earlier in sources.items():
        for source in earlier:
            targets.setdefault(source, []).append(stage)

    def needs(action: Action) -> list[Action]:
        stage, m = action.stage, action.microbatch
        if action.kind == "F":
            return [Action("F", source, m) for source in sources.get(stage, ())]
        if action.kind == "W":
            return [Action("I", stage, m)]
        forward = [Action("F", needed, m) for needed in (stage, *outputs)]
        return [*forward, *(Action(backward, target, m) for target in targets.get(stage, ()))]

    return needs


def _peak(table: Sequence[Action], kept: Mapping[int, Kept]) -> float:
    """The most that is kept at once."""
    split = any(action.kind == "W" for action in table)
    now = most = 0.0
    for action in table:
        size = kept[action.stage]
        if action.kind == "F":
            now += size.forward
            most = max(most, now)
        else:
            most = max(most, now + size.computing)
            left = size.weights if split else 0.0
            now += {"B": -size.forward, "I": left - size.forward, "W": -left}[action.kind]
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
