"""What steps measured: where their time went.

one step    │ data │ forward, loss, backward, optimizer                            │
            │ wait │ ─ computing ─ ▒▒▒ ─ computing ─ ▒▒ ─ computing ─ ░░░ ─ compu… │
                                     └── waits for other stages      └── waits for gradients of other replicas
"""

import dataclasses
from typing import Self

INPUT_BOUND = 0.3
"""Share of the time spent waiting for batches from which on a run counts as input-bound."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Totals:
    """Numbers that add up field by field."""

    def __add__(self, other: Self) -> Self:
        names = [field.name for field in dataclasses.fields(self)]
        return type(self)(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeSplit(Totals):
    """Where the time of some training steps went on one rank, in seconds.

    Attributes:
        steps: How many batches.
        total: Time of these steps, from asking for the batch to the end of the step.
        data: Waiting for batches.
        pipeline: Waiting for other stages: the pipeline's bubble, imbalance and transfers.
        gradients: Waiting for gradients of other replicas after the backward pass had ended.
    """

    steps: int = 0
    total: float = 0.0
    data: float = 0.0
    pipeline: float = 0.0
    gradients: float = 0.0

    @property
    def computing(self) -> float:
        """What is left: the rank's own work."""
        return max(self.total - self.data - self.pipeline - self.gradients, 0.0)

    @property
    def is_input_bound(self) -> bool:
        """Whether batches don't come as fast as they could be trained on."""
        return self.data > INPUT_BOUND * self.total

    def __str__(self) -> str:
        if not self.steps:
            return "no steps"
        parts = {
            "waiting for data": self.data,
            "for other stages": self.pipeline,
            "for gradients of other replicas": self.gradients,
            "computing": self.computing,
        }
        shares = ", ".join(f"{part / self.total:.0%} {name}" for name, part in parts.items())
        return f"{1000 * self.total / self.steps:.3g} ms a step: {shares}"

    def advice(self) -> str | None:
        """What to change first, if something stands out."""
        if not self.is_input_bound:
            return None
        return (
            f"The run is input-bound: {self.data / self.total:.0%} of its time went into waiting for batches. More"
            " devices won't help before the loader is faster: raise `num_workers`, set `persistent_workers=True`, or do"
            " less per sample."
        )
