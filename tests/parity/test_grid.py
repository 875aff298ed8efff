"""Every layout gives one process's numbers: each gradient, parameter, buffer and logged value, in float64 to 1e-10.

The rows cover each value of each axis with each layout at least once; the full product would add runs, not reasons.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from tests import nets
from tests.fitting import Case, Layout, Record, assert_same, fit_alone, fit_on_ranks

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "plain": nets.plain,
    "residual": nets.Residual,
    "unet": nets.UNet,
    "two_branch": nets.TwoBranch,
    "frozen": nets.frozen_backbone,
}
CLIPS: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"gradient_clip_val": 0.05},
    "value": {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"},
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One run of the grid."""

    network: str
    pipeline: int
    data: int
    microbatches: int
    optimizer: Callable[..., Any] = nets.sgd
    clip: str = "none"
    accumulate: int = 1

    def __str__(self) -> str:
        return (
            f"{self.network}-P{self.pipeline}-D{self.data}-M{self.microbatches}-{self.optimizer.__name__}"
            f"-{self.clip}-acc{self.accumulate}"
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


def classifier(network: str, optimizer: Callable[..., Any]) -> nets.Classifier:
    return nets.Classifier(NETWORKS[network](), optimizer)


GRID = [
    Row("plain", 1, 1, 1),
    Row("unet", 1, 1, 4, nets.adamw, "norm"),
    Row("residual", 1, 2, 1, nets.adamw, "norm", 2),
    Row("two_branch", 1, 2, 2, nets.sgd, "value"),
    Row("frozen", 1, 2, 3, nets.sgd, "none", 2),
    Row("plain", 2, 1, 1, nets.adamw, "value"),
    Row("residual", 2, 1, 3, nets.sgd, "norm"),
    Row("unet", 2, 1, 4, nets.sgd, "none", 2),
    Row("two_branch", 2, 1, 2, nets.adamw, "norm", 2),
    Row("frozen", 2, 1, 2, nets.sgd, "norm"),
    Row("plain", 3, 1, 3, nets.sgd, "norm", 2),
    Row("residual", 3, 1, 2, nets.adamw, "value"),
    Row("unet", 3, 1, 4, nets.adamw, "norm"),
    Row("two_branch", 3, 1, 1, nets.sgd),
    Row("frozen", 3, 1, 4, nets.adamw, "none", 2),
    Row("plain", 4, 1, 2, nets.sgd, "value"),
    Row("residual", 4, 1, 4, nets.sgd, "norm", 2),
    Row("unet", 4, 1, 3, nets.sgd, "norm"),
    Row("frozen", 4, 1, 1, nets.adamw),
    Row("plain", 2, 2, 2, nets.adamw, "norm"),
    Row("residual", 2, 2, 4, nets.sgd, "none", 2),
    Row("unet", 2, 2, 3, nets.adamw, "value", 2),
    Row("two_branch", 2, 2, 4, nets.sgd, "norm"),
    Row("frozen", 2, 2, 1, nets.sgd, "norm", 2),
]


@functools.cache
def oracle(network: str, optimizer: Callable[..., Any], clip: str, accumulate: int) -> Record:
    """One process, whatever the layout."""
    return fit_alone(Row(network, 1, 1, 1, optimizer, clip, accumulate).case)


@pytest.mark.parametrize("row", GRID, ids=str)
def test_layout_equals_one_process(row: Row) -> None:
    expected = oracle(row.network, row.optimizer, row.clip, row.accumulate)
    record = fit_on_ranks(row.case, Layout(row.pipeline, row.data, {"num_microbatches": row.microbatches}))
    assert len(record.gradients) >= 5
    assert_same(record, expected)


def test_every_value_of_every_axis_is_there() -> None:
    layouts = {(row.pipeline, row.data) for row in GRID}
    assert layouts == {(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2)}
    for layout in layouts - {(1, 1)}:
        rows = [row for row in GRID if (row.pipeline, row.data) == layout]
        assert {row.optimizer for row in rows} == {nets.sgd, nets.adamw}
        assert {row.accumulate for row in rows} == {1, 2}
        assert {row.clip for row in rows} == {"none", "norm", "value"}
    assert {row.microbatches for row in GRID} == {1, 2, 3, 4}
    assert {row.network for row in GRID} == set(NETWORKS)
