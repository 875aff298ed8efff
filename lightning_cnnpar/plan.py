"""The layout that a run uses, as plain data: printed at start and saved as JSON."""

import dataclasses
import json
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One pipeline stage.

    Attributes:
        network: Dotted name of the network that was cut.
        stage: Index in the network.
        rank: Index in the replica of the rank that runs it.
        modules: Submodules that the stage calls.
        parameters: Number of parameter elements that it owns.
        flops: Floating point operations of forward and backward for the batch it was planned with; 0 if unknown.
    """

    network: str
    stage: int
    rank: int
    modules: tuple[str, ...]
    parameters: int
    flops: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """How a run is laid out over its ranks.

    Attributes:
        pipeline_parallel_size: P, ranks of a replica.
        data_parallel_size: D, replicas.
        schedule: Name of the pipeline schedule.
        num_microbatches: Microbatches that a batch is cut into.
        stages: Every stage of every network.
        reason: Why this layout was chosen.
        stages_per_rank: V, stages of a network on each rank.
    """

    pipeline_parallel_size: int
    data_parallel_size: int
    schedule: str = "gpipe"
    num_microbatches: int = 1
    stages: tuple[StagePlan, ...] = ()
    reason: str = ""
    stages_per_rank: int = 1

    @property
    def bubble_fraction(self) -> float:
        """Share of a step in which a rank waits, with equal stages.

        (P - 1) / (M + P - 1) for GPipe and 1F1B; P - 1 is divided by V for interleaved stages, and M multiplied by 3
        for a zero-bubble schedule.
        """
        waiting = (self.pipeline_parallel_size - 1) / self.stages_per_rank
        working = self.num_microbatches * (3 if self.schedule == "zero_bubble" else 1)
        return waiting / (working + waiting)

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` reads it back to an equal plan."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "ParallelPlan":
        """Read a plan that `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        stages = tuple(StagePlan(**{**stage, "modules": tuple(stage["modules"])}) for stage in fields.pop("stages"))
        return cls(stages=stages, **fields)

    def table(self) -> str:
        """The plan as text, one row a stage."""
        head = (
            f"Layout: {self.data_parallel_size} replica(s) x {self.pipeline_parallel_size} stage rank(s),"
            f" schedule {self.schedule}, {self.num_microbatches} microbatch(es),"
            f" ideal bubble {self.bubble_fraction:.0%}. {self.reason}"
        ).rstrip()
        rows: list[tuple[str, ...]] = [("network", "stage", "ranks", "modules", "parameters", "FLOPs")]
        rows += [self._row(stage) for stage in self.stages]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([head, *lines] if self.stages else [head])

    def _row(self, stage: StagePlan) -> tuple[str, ...]:
        ranks = [d * self.pipeline_parallel_size + stage.rank for d in range(self.data_parallel_size)]
        return (
            stage.network or "(root)",
            str(stage.stage),
            _abbreviate([str(rank) for rank in ranks]),
            _abbreviate(list(stage.modules)),
            f"{stage.parameters:,}",
            f"{stage.flops:.2e}" if stage.flops else "-",
        )


def _abbreviate(names: list[str], shown: int = 4) -> str:
    if len(names) <= shown:
        return ", ".join(names) or "-"
    return f"{names[0]} ... {names[-1]} ({len(names)})"
