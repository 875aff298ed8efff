"""ZeRO stages give one process's numbers: each parameter, buffer, logged value and optimizer state."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest

from lightning_cnnpar.data_parallel import sharding
from tests import nets
from tests.fitting import Case, Layout, Record, assert_same, assert_same_tree, fit_alone, fit_on_ranks
from tests.parity.test_grid import CLIPS, classifier


def small_units() -> list[Any]:
    """Called on every rank: units of a layer each, so that networks of a few kilobytes have many."""
    sharding.SMALLEST_UNIT = 1
    return []


@dataclasses.dataclass(frozen=True)
class Row:
    """One run of the grid."""

    network: str
    pipeline: int
    data: int
    zero: int
    microbatches: int = 1
    optimizer: Callable[..., Any] = nets.sgd
    clip: str = "none"
    accumulate: int = 1

    def __str__(self) -> str:
        return (
            f"{self.network}-P{self.pipeline}-D{self.data}-zero{self.zero}-M{self.microbatches}"
            f"-{self.optimizer.__name__}-{self.clip}-acc{self.accumulate}"
        )

    @property
    def case(self) -> Case:
        return Case(
            module=functools.partial(classifier, self.network, self.optimizer),
            train=nets.images40,
            val=nets.images12,
            batch=8,
            callbacks=small_units,
            trainer={"accumulate_grad_batches": self.accumulate, "max_epochs": 2, **CLIPS[self.clip]},
        )


GRID = [
    Row("plain", 1, 2, 1, 1, nets.sgd, "norm"),
    Row("plain", 1, 2, 2, 1, nets.adamw, "norm", 2),
    Row("plain", 1, 2, 3, 1, nets.adamw, "norm"),
    Row("unet", 1, 2, 1, 2, nets.adamw, "value", 2),
    Row("unet", 1, 2, 3, 2, nets.sgd, "none", 2),
    Row("residual", 2, 2, 1, 4, nets.adamw, "norm"),
    Row("residual", 2, 2, 2, 3, nets.sgd, "norm", 2),
    Row("residual", 2, 2, 3, 2, nets.adamw, "value"),
    Row("frozen", 2, 2, 3, 4, nets.adamw, "norm", 2),
    Row("frozen", 1, 2, 2, 1, nets.adamw),
    Row("two_branch", 2, 2, 3, 1, nets.sgd),
    Row("unet", 2, 2, 2, 2, nets.adamw, "none"),
    Row("unet", 2, 2, 3, 4, nets.adamw, "norm", 2),
    Row("plain", 1, 4, 1, 1, nets.adamw),
    Row("plain", 1, 4, 2, 1, nets.sgd, "value"),
    Row("residual", 1, 4, 3, 1, nets.adamw, "none", 2),
]


@functools.cache
def oracle(network: str, optimizer: Callable[..., Any], clip: str, accumulate: int) -> Record:
    """One process, whatever the layout."""
    return fit_alone(Row(network, 1, 1, 0, 1, optimizer, clip, accumulate).case)


@pytest.mark.parametrize("row", GRID, ids=str)
def test_zero_equals_one_process(row: Row) -> None:
    expected = oracle(row.network, row.optimizer, row.clip, row.accumulate)
    options = {"num_microbatches": row.microbatches, "zero_stage": row.zero}
    record = fit_on_ranks(row.case, Layout(row.pipeline, row.data, options))
    assert len(record.gradients) >= 4
    assert_same(record, expected)
    assert_same_tree(record.checkpoint["optimizer_states"], expected.checkpoint["optimizer_states"])
    assert_same_tree(record.checkpoint["state_dict"], expected.checkpoint["state_dict"])
