"""Where to cut: exact search over topological positions. Plain numbers in and out, no torch.

A network in topological order is a row of *blocks*; between two blocks lies a *boundary* where it may be cut:

    blocks       [ 3 ][ 1 ][ 4 ][ 1 ][ 5 ]        cost of each
    boundaries       1    2    3    4              what crosses there, in the unit of the cost

A stage costs its blocks divided by its rank's speed, plus what crosses at its end. The slowest stage sets the pace.
"""

import dataclasses
from collections.abc import Sequence


class ImbalanceError(ValueError):
    """No cut satisfies what was asked.

    Attributes:
        possible: The largest number of stages that can be made.
    """

    def __init__(self, message: str, possible: int) -> None:
        super().__init__(message)
        self.possible = possible


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What can be cut.

    Attributes:
        costs: Cost of each block.
        crossing: Cost of what crosses boundary i, before block i; `len(costs) + 1` entries, 0 at both ends.
        substantial: Whether a block may be a stage alone: it holds parameters or costs something.
        memory: Bytes that each block keeps, where `memory_limits` are given.
    """

    costs: Sequence[float]
    crossing: Sequence[float]
    substantial: Sequence[bool]
    memory: Sequence[float] = ()


def cut(row: Row, speeds: Sequence[float], memory_limits: Sequence[float] | None = None) -> tuple[int, ...]:
    """Boundaries at which stages begin, so that the slowest stage is as fast as can be.

    Among the cuts with the same slowest stage, the one with the least crossing in total.

    Args:
        row: The blocks.
        speeds: Relative speed of the rank of each stage.
        memory_limits: Bytes that each stage may keep.

    Returns:
        `len(speeds) - 1` increasing boundaries.

    Raises:
        ImbalanceError: If there are fewer possible stages than speeds, or no cut fits the memory.
    """
    possible = max_stages(row)
    if possible < len(speeds):
        raise ImbalanceError(f"{len(speeds)} stages were asked for, {possible} are possible.", possible)
    best = _least_slowest(row, speeds, memory_limits)
    if best is None:
        raise ImbalanceError(f"No cut in {len(speeds)} stages keeps every stage within {memory_limits}.", possible)
    return _least_crossing(row, speeds, memory_limits, best)


def max_stages(row: Row) -> int:
    """How many stages can be made at most: one for each substantial block."""
    return sum(row.substantial)


def stage_costs(row: Row, boundaries: Sequence[int], speeds: Sequence[float]) -> tuple[float, ...]:
    """Cost of each stage of a cut."""
    ends = (*boundaries, len(row.costs))
    starts = (0, *boundaries)
    return tuple(
        sum(row.costs[start:end]) / speed + row.crossing[end]
        for start, end, speed in zip(starts, ends, speeds, strict=True)
    )


def _segments(row: Row, end: int, speed: float, limit: float | None, ceiling: float) -> list[tuple[int, float]]:
    """Starts of the stages that may end at `end`, each with its cost, the shortest first; none above `ceiling`."""
    found: list[tuple[int, float]] = []
    cost = memory = 0.0
    substantial = False
    for start in range(end - 1, -1, -1):
        cost += row.costs[start] / speed
        memory += row.memory[start] if limit is not None else 0.0
        substantial = substantial or row.substantial[start]
        total = cost + row.crossing[end]
        if total > ceiling or (limit is not None and memory > limit):
            break
        if substantial:
            found.append((start, total))
    return found


def _least_slowest(row: Row, speeds: Sequence[float], limits: Sequence[float] | None) -> float | None:
    """Cost of the slowest stage of the best cut; `None` if none fits."""
    count, infinity = len(row.costs), float("inf")
    reached = [0.0] + [infinity] * count
    for stage, speed in enumerate(speeds):
        limit = None if limits is None else limits[stage]
        following = [infinity] * (count + 1)
        for end in _ends(stage, len(speeds), count):
            for start, cost in _segments(row, end, speed, limit, infinity):
                if cost >= following[end]:
                    break  # longer stages only cost more
                following[end] = min(following[end], max(reached[start], cost))
        reached = following
    return None if reached[count] == infinity else reached[count]


def _least_crossing(
    row: Row, speeds: Sequence[float], limits: Sequence[float] | None, slowest: float
) -> tuple[int, ...]:
    """Among cuts no slower than `slowest`, the one with the least crossing."""
    count, infinity = len(row.costs), float("inf")
    ceiling = slowest * (1 + 1e-12)
    reached = [0.0] + [infinity] * count
    origins: list[list[int]] = []
    for stage, speed in enumerate(speeds):
        limit = None if limits is None else limits[stage]
        following, origin = [infinity] * (count + 1), [0] * (count + 1)
        for end in _ends(stage, len(speeds), count):
            for start, _ in _segments(row, end, speed, limit, ceiling):
                total = reached[start] + row.crossing[end]
                if total < following[end]:
                    following[end], origin[end] = total, start
        reached = following
        origins.append(origin)
    boundaries = [count]
    for origin in reversed(origins):
        boundaries.append(origin[boundaries[-1]])
    return tuple(reversed(boundaries))[1:-1]


def _ends(stage: int, stages: int, count: int) -> range:
    """Where a stage may end, so that every stage has a block."""
    last = stage == stages - 1
    return range(count if last else stage + 1, count + 1 if last else count - (stages - 1 - stage) + 1)
