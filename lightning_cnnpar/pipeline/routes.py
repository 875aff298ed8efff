"""Who sends what to whom in one program, worked out once. Plain data: no tensor is touched.

Everything that one stage sends to one other rank for one microbatch is a *bundle*: the values that stages there
receive, and all outputs of the stage, since every rank of a replica ends with the network's outputs.

    stage 0 on rank 0, sends a, skip        bundle 0→1: a, skip
    stage 1 on rank 1, sends b              bundle 1→0: b
    stage 2 on rank 0, makes output 0       bundle 0→1: output 0

Between two ranks bundles travel in the order in which the sender's table makes them. Both sides know that table, so no
message needs a name.
"""

import dataclasses
from collections.abc import Callable, Mapping

from lightning_cnnpar.partition.stage import Program, Stage
from lightning_cnnpar.pipeline.schedules import Action, Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundle:
    """What one stage sends to one other rank for each microbatch.

    Attributes:
        stage: The stage that sends.
        source: Its rank.
        destination: The rank that receives.
        values: Names of the values for stages of that rank.
        positions: Where these are among the values that the stage sends.
        outputs: Numbers of the network's outputs.
    """

    stage: int
    source: int
    destination: int
    values: tuple[str, ...]
    positions: tuple[int, ...]
    outputs: tuple[int, ...]


Parcel = tuple[Bundle, int]
"""A bundle of one microbatch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routes:
    """The bundles of a program as one rank sees them.

    Attributes:
        rank: That rank.
        stages: Its stages, by index.
        table: Its actions.
        outgoing: Bundles that each of its stages sends.
        incoming: For each other rank, the parcels that come from there, in order.
        received_in: For each value that comes from another rank, the bundle that it is part of.
        local: Values of its own stages that its own stages receive.
        read_last: For each of its stages, the values that no action after it reads, for one microbatch.
        gradients_after: Parcels of gradients to send back after each backward action.
        gradients_from: For each other rank, the parcels whose gradients come back from there, in order.
    """

    rank: int
    stages: Mapping[int, Stage]
    table: Table
    outgoing: Mapping[int, tuple[Bundle, ...]]
    incoming: Mapping[int, tuple[Parcel, ...]]
    received_in: Mapping[str, Bundle]
    local: frozenset[str]
    read_last: Mapping[int, tuple[str, ...]]
    gradients_after: Mapping[Action, tuple[Parcel, ...]]
    gradients_from: Mapping[int, tuple[Parcel, ...]]


def plan_routes(program: Program, rank: int, num_ranks: int, table_of: Callable[[int], Table]) -> Routes:
    """Work out the routes of one rank.

    Args:
        program: The cut network.
        rank: Pipeline rank whose routes are wanted.
        num_ranks: P.
        table_of: The action table of each pipeline rank.
    """
    bundles = _bundles(program, num_ranks)
    own = {stage.index: stage for stage in program.stages if stage.rank == rank}
    tables = {other: table_of(other) for other in range(num_ranks)}
    incoming = [bundle for bundle in bundles if bundle.destination == rank]
    after = _gradients_after(program, tables[rank], incoming)
    received = {value for stage in own.values() for value in stage.receives}
    return Routes(
        rank=rank,
        stages=own,
        table=tables[rank],
        outgoing={index: tuple(b for b in bundles if b.stage == index) for index in own},
        incoming={
            other: _in_order(tables[other], [b for b in incoming if b.source == other])
            for other in sorted({bundle.source for bundle in incoming})
        },
        received_in={value: bundle for bundle in incoming for value in bundle.values},
        local=frozenset(value for stage in own.values() for value in stage.sends if value in received),
        read_last=_read_last(list(own.values())),
        gradients_after={action: after.get(action, ()) for action in tables[rank].backward},
        gradients_from={
            other: _gradients_between(program, tables[other], [b for b in bundles if b.destination == other], rank)
            for other in range(num_ranks)
            if other != rank
        },
    )


def _bundles(program: Program, num_ranks: int) -> list[Bundle]:
    readers: dict[str, set[int]] = {}
    for stage in program.stages:
        for value in stage.receives:
            readers.setdefault(value, set()).add(stage.rank)
    bundles = []
    for stage in program.stages:
        for destination in range(num_ranks):
            values = tuple(value for value in stage.sends if destination in readers.get(value, ()))
            if destination != stage.rank and (values or stage.outputs):
                bundles.append(
                    Bundle(
                        stage=stage.index,
                        source=stage.rank,
                        destination=destination,
                        values=values,
                        positions=tuple(stage.sends.index(value) for value in values),
                        outputs=stage.outputs,
                    )
                )
    return bundles


def _in_order(table: Table, bundles: list[Bundle]) -> tuple[Parcel, ...]:
    by_stage = {bundle.stage: bundle for bundle in bundles}
    return tuple((by_stage[action.stage], action.microbatch) for action in table.forward if action.stage in by_stage)


def _gradients_after(program: Program, table: Table, incoming: list[Bundle]) -> dict[Action, tuple[Parcel, ...]]:
    """Gradients of a parcel leave once the last stage of the rank that read one of its values has run backward."""
    waiting: dict[Parcel, Action] = {}
    for action in table.backward:
        receives = set(program.stages[action.stage].receives)
        for bundle in incoming:
            if not receives.isdisjoint(bundle.values):
                waiting[bundle, action.microbatch] = action
    after: dict[Action, list[Parcel]] = {}
    for parcel, action in waiting.items():
        after.setdefault(action, []).append(parcel)
    # In the order of the table: both sides of a pair derive the same sequence from it.
    return {action: tuple(after[action]) for action in table.backward if action in after}


def _gradients_between(program: Program, table: Table, incoming: list[Bundle], producer: int) -> tuple[Parcel, ...]:
    """The parcels whose gradients go back to one rank, in the order of the table that sends them."""
    after = _gradients_after(program, table, incoming)
    return tuple(parcel for parcels in after.values() for parcel in parcels if parcel[0].source == producer)


def _read_last(stages: list[Stage]) -> dict[int, tuple[str, ...]]:
    readers = {value: stage.index for stage in stages for value in stage.receives}
    return {stage.index: tuple(v for v in stage.receives if readers[v] == stage.index) for stage in stages}
