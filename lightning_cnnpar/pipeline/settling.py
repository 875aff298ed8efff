"""When a rank may forget what it has sent. Plain data: no tensor is touched.

A block that is on its way stays in memory until the other rank has received it. Nobody confirms that, but tables tell:
what arrives later proves it. With two ranks under 1F1B, rank 0 knows at B0.0, from the gradient that comes back, that
rank 1 has received the activations of microbatch 0.

Each action gets a vector clock (Mattern, 1989): how many actions of every rank have certainly ended before it. A block
is settled before the first action whose clock counts the action of the other rank that received it.
"""

from collections.abc import Mapping, Sequence

from lightning_cnnpar.partition.stage import Program
from lightning_cnnpar.pipeline.schedules import Action, Actions, Kind

SendKey = tuple[str, int, int, int]
"""Of a parcel: "F" and the stage that sends, or "B" and the stage whose gradients go back; the peer; the microbatch."""

Clock = tuple[int, ...]


def settled_before(program: Program, tables: Sequence[Actions], rank: int) -> dict[Action, tuple[SendKey, ...]]:
    """For each action of a rank, the sends that have certainly been received by then, and had not been one before.

    Args:
        program: The cut network.
        tables: Actions of each rank, forward and backward in one sequence.
        rank: Whose sends.
    """
    clocks = _clocks(program, tables)
    sends = _received_at(program, tables, rank)
    settled: dict[Action, tuple[SendKey, ...]] = {}
    for action in tables[rank]:
        # What the action needs is waited for inside of it, so only what was known before it counts.
        known = clocks[action][0]
        done = [key for key, (peer, position) in sends.items() if known[peer] > position]
        for key in done:
            del sends[key]
        settled[action] = tuple(done)
    return settled


def _clocks(program: Program, tables: Sequence[Actions]) -> dict[Action, tuple[Clock, Clock]]:
    """Of each action: the clock before it, and after it."""
    back: Kind = "I" if any(action.kind == "I" for table in tables for action in table) else "B"
    outputs = [stage.index for stage in program.stages if stage.outputs]
    sources = {stage.index: sorted({program.producer(v) for v in stage.receives}) for stage in program.stages}
    targets: dict[int, list[int]] = {stage.index: [] for stage in program.stages}
    for stage, earlier in sources.items():
        for source in earlier:
            targets[source].append(stage)

    def needs(action: Action) -> list[Action]:
        stage, m = action.stage, action.microbatch
        if action.kind == "F":
            return [Action("F", source, m) for source in sources[stage]]
        if action.kind == "W":
            return []
        return [*(Action("F", made, m) for made in outputs), *(Action(back, target, m) for target in targets[stage])]

    now: list[Clock] = [(0,) * len(tables) for _ in tables]
    positions = [0] * len(tables)
    clocks: dict[Action, tuple[Clock, Clock]] = {}
    moved = True
    while moved:
        moved = False
        for rank, table in enumerate(tables):
            while positions[rank] < len(table) and all(n in clocks for n in needs(table[positions[rank]])):
                action = table[positions[rank]]
                heard = [now[rank], *(clocks[need][1] for need in needs(action))]
                after = [max(column) for column in zip(*heard, strict=True)]
                after[rank] += 1
                clocks[action] = (now[rank], tuple(after))
                now[rank] = tuple(after)
                positions[rank] += 1
                moved = True
    return clocks


def _received_at(program: Program, tables: Sequence[Actions], rank: int) -> dict[SendKey, tuple[int, int]]:
    """For each parcel that a rank sends: the peer, and the position in its table at which it has been received."""
    at: Mapping[int, Mapping[Action, int]] = {p: {a: i for i, a in enumerate(t)} for p, t in enumerate(tables)}
    first_back: dict[tuple[int, int], int] = {}
    for peer, table in enumerate(tables):
        for position, action in enumerate(table):
            if action.kind in ("B", "I"):
                first_back.setdefault((peer, action.microbatch), position)
    microbatches = {action.microbatch for table in tables for action in table}
    received: dict[SendKey, tuple[int, int]] = {}
    for stage in program.stages:
        for other in program.stages:
            read = set(stage.sends) & set(other.receives)
            if not read or stage.rank == other.rank:
                continue
            for m in microbatches:
                if stage.rank == rank:
                    key = ("F", stage.index, other.rank, m)
                    position = at[other.rank][Action("F", other.index, m)]
                    received[key] = other.rank, max(position, received.get(key, (0, 0))[1])
                if other.rank == rank:
                    back: Kind = "B" if Action("B", stage.index, m) in at[stage.rank] else "I"
                    position = at[stage.rank][Action(back, stage.index, m)]
                    received["B", stage.index, stage.rank, m] = stage.rank, position
        if stage.outputs and stage.rank == rank:
            # Outputs are taken before the first backward of their microbatch; a rank without stages takes them last.
            for peer in range(len(tables)):
                for m in microbatches if peer != rank else ():
                    key = ("F", stage.index, peer, m)
                    taken = first_back.get((peer, m), len(tables[peer]))
                    received[key] = peer, max(taken, received.get(key, (0, 0))[1])
    return received
