"""Where the time of steps goes: waiting for data, for other stages, for gradients, and computing."""

import time
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_cnnpar import HybridStrategy
from lightning_cnnpar.metrics import TimeSplit
from tests import nets
from tests.fitting import QUIET
from tests.ranks import run_ranks

LATENCY = 0.1


class Slow(Dataset[Any]):
    """Takes its time for each sample."""

    def __init__(self, latency: float) -> None:
        self._images = nets.Images(40)
        self._latency = latency

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._latency)
        return self._images[index]


def _fit(rank: int, world: int, latency: float) -> tuple[TimeSplit, list[str]]:
    import warnings

    strategy = HybridStrategy(2, 2)
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, max_epochs=1, precision="64-true", **QUIET
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(nets.Classifier(), DataLoader(Slow(latency), 4))
        trainer.validate(trainer.lightning_module, DataLoader(nets.Images(8), 4), verbose=False)
    assert not [callback for callback in trainer.callbacks if "lightning_cnnpar" in type(callback).__module__]
    return strategy.time_split, [str(w.message) for w in caught if "input-bound" in str(w.message)]


@pytest.mark.case("C49")
def test_case_c49_a_slow_loader_is_told_apart_from_slow_communication() -> None:
    results = run_ranks(4, _fit, LATENCY)
    for split, _ in results:
        # Five steps of a replica, less the two that don't count. The samples of a batch come one after the other.
        assert split.steps == 3
        assert split.total > split.data > 3 * 4 * LATENCY * 0.9
        assert min(split.pipeline, split.gradients) > 0
        assert split.is_input_bound
    assert [len(warned) for _, warned in results] == [1, 0, 0, 0]
    assert "num_workers" in results[0][1][0]


def test_nothing_is_said_when_nothing_stands_out() -> None:
    split = TimeSplit(steps=10, total=2.0, data=0.2, pipeline=0.5, gradients=0.1)
    assert split.computing == pytest.approx(1.2)
    assert split.advice() is None
    assert str(split) == (
        "200 ms a step: 10% waiting for data, 25% for other stages, 5% for gradients of other replicas, 60% computing"
    )
    assert str(TimeSplit()) == "no steps"
