"""Schedules that run the step once for each microbatch give one process's numbers, and so does recomputation."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests import nets
from tests.fitting import Case, Layout, Record, assert_same, fit_alone, fit_on_ranks
from tests.parity.test_grid import CLIPS, classifier


@dataclasses.dataclass(frozen=True)
class Row:
    """One run of the grid."""

    schedule: str
    network: str
    pipeline: int
    data: int
    microbatches: int
    optimizer: Callable[..., Any] = nets.sgd
    clip: str = "none"
    accumulate: int = 1
    checkpointing: str = "never"
    stages_per_rank: int = 1

    def __str__(self) -> str:
        return (
            f"{self.schedule}-{self.network}-P{self.pipeline}x{self.stages_per_rank}-D{self.data}-M{self.microbatches}"
            f"-{self.optimizer.__name__}-{self.clip}-acc{self.accumulate}-{self.checkpointing}"
        )

    @property
    def case(self) -> Case:
        return Case(
            module=functools.partial(classifier, self.network, self.optimizer),
            train=nets.images40,
            val=nets.images12,
            batch=8,
            trainer={"accumulate_grad_batches": self.accumulate, "max_epochs": self.accumulate, **CLIPS[self.clip]},
        )

    @property
    def layout(self) -> Layout:
        return Layout(
            self.pipeline,
            self.data,
            {
                "num_microbatches": self.microbatches,
                "schedule": self.schedule,
                "activation_checkpointing": self.checkpointing,
                "stages_per_rank": self.stages_per_rank,
            },
        )


GRID = [
    Row("1f1b", "plain", 1, 1, 3),
    Row("1f1b", "plain", 2, 1, 3),
    Row("1f1b", "residual", 2, 1, 4, nets.adamw, "norm", 2),
    Row("1f1b", "unet", 2, 1, 4, nets.sgd, "value", 1, "always"),
    Row("1f1b", "two_branch", 2, 2, 2, nets.sgd, "norm", 2, "except_last"),
    Row("1f1b", "frozen", 2, 2, 4, nets.adamw, "none"),
    Row("1f1b", "unet", 3, 1, 8, nets.sgd, "norm"),
    Row("1f1b", "residual", 4, 1, 4, nets.sgd, "value", 2, "always"),
    Row("interleaved_1f1b", "residual", 2, 1, 4, nets.sgd, "norm", 1, "never", 2),
    Row("interleaved_1f1b", "unet", 2, 1, 3, nets.adamw, "none", 2, "except_last", 2),
    Row("interleaved_1f1b", "plain", 2, 2, 2, nets.sgd, "value", 1, "always", 2),
    Row("interleaved_1f1b", "residual", 3, 1, 3, nets.sgd, "none", 1, "never", 2),
    Row("zero_bubble", "plain", 2, 1, 4, nets.adamw, "norm"),
    Row("zero_bubble", "unet", 2, 1, 3, nets.sgd, "none", 2),
    Row("zero_bubble", "residual", 3, 1, 6, nets.sgd, "norm", 1, "always"),
    Row("zero_bubble", "two_branch", 2, 2, 4, nets.sgd, "value"),
    Row("zero_bubble", "frozen", 4, 1, 4, nets.adamw, "none", 2),
    Row("zero_bubble", "residual", 2, 1, 4, nets.sgd, "none", 1, "except_last", 2),
    Row("gpipe", "unet", 2, 1, 4, nets.sgd, "norm", 1, "always"),
    Row("gpipe", "residual", 2, 2, 2, nets.adamw, "none", 2, "except_last"),
    Row("gpipe", "plain", 3, 1, 3, nets.sgd, "value", 1, "always"),
]


@functools.cache
def oracle(network: str, optimizer: Callable[..., Any], clip: str, accumulate: int) -> Record:
    """One process, whatever the layout."""
    return fit_alone(Row("gpipe", network, 1, 1, 1, optimizer, clip, accumulate).case)


@pytest.mark.parametrize("row", GRID, ids=str)
def test_schedule_equals_one_process(row: Row) -> None:
    expected = oracle(row.network, row.optimizer, row.clip, row.accumulate)
    record = fit_on_ranks(row.case, row.layout)
    assert len(record.gradients) >= 5
    assert_same(record, expected)
