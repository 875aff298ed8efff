"""What is worked out once for each program of a network, and used by every call."""

from collections.abc import Mapping, Sequence, Set
from typing import final

from torch import nn

from lightning_cnnpar.partition.stage import Program
from lightning_cnnpar.pipeline.batchnorm import batch_norms
from lightning_cnnpar.pipeline.routes import Routes, plan_routes
from lightning_cnnpar.pipeline.schedules import Action, Actions, StepSchedule, Table, gpipe, step_tables
from lightning_cnnpar.pipeline.settling import SendKey, settled_before

StepRoutes = tuple[Actions, Routes, Mapping[Action, Sequence[SendKey]]]
"""This rank's table, its routes, and the sends that are done before each action."""


@final
class Prepared:
    """A program as one rank runs it.

    Args:
        program: The cut network.
        root: The network.
        rank: This rank of the replica.
        num_ranks: P.

    Attributes:
        program: The cut network.
        batch_norms: BatchNorm layers of all stages.
        readers: For each input of the network, the ranks that read it.
        whole: Whether batches are not cut, since outputs turned out not to go by sample.
    """

    def __init__(self, program: Program, root: nn.Module, rank: int, num_ranks: int) -> None:
        self.program = program
        self.batch_norms = batch_norms(root)
        self.readers: Mapping[int, Set[int]] = _readers(program)
        self.whole = False
        self._rank, self._num_ranks = rank, num_ranks
        self._stage_ranks = [stage.rank for stage in program.stages]
        self._routes: dict[int, Routes] = {}
        self._step_routes: dict[tuple[StepSchedule, int], StepRoutes] = {}

    def routes(self, num_microbatches: int) -> Routes:
        """For a call with the whole batch."""
        if num_microbatches not in self._routes:
            self._routes[num_microbatches] = plan_routes(
                self.program,
                self._rank,
                self._num_ranks,
                lambda rank: gpipe(self._stage_ranks, rank, num_microbatches),
            )
        return self._routes[num_microbatches]

    def step_routes(self, schedule: StepSchedule, num_microbatches: int) -> StepRoutes:
        """For a step that calls the network once for each microbatch."""
        key = (schedule, num_microbatches)
        if key not in self._step_routes:
            tables = step_tables(schedule, self._stage_ranks, self._num_ranks, num_microbatches)
            routes = plan_routes(self.program, self._rank, self._num_ranks, lambda rank: _two_parts(tables[rank]))
            settled = settled_before(self.program, tables, self._rank)
            self._step_routes[key] = tables[self._rank], routes, settled
        return self._step_routes[key]


def _readers(program: Program) -> dict[int, set[int]]:
    readers: dict[int, set[int]] = {}
    for stage in program.stages:
        for index in stage.inputs:
            readers.setdefault(index, set()).add(stage.rank)
    return readers


def _two_parts(table: Actions) -> Table:
    """The order of what goes there, and the order of what comes back."""
    return Table(
        forward=tuple(action for action in table if action.kind == "F"),
        backward=tuple(action for action in table if action.kind in ("B", "I")),
    )
