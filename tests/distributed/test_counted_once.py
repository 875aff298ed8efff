"""Replicas count each sample once, and say so when they log different things."""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_cnnpar.mirror import ShardedIterable
from tests import nets
from tests.fitting import (
    Case,
    Layout,
    Record,
    loaders,
    make_strategy,
    make_trainer,
)
from tests.ranks import run_ranks

# Of plain Lightning, in this process.
pytestmark = pytest.mark.filterwarnings("ignore")

CASE = Case(module=nets.Classifier, train=nets.images40, val=nets.images12)
GRID = Layout(2, 2, {"num_microbatches": 2})


class CountsInCallback(pl.Callback):
    """Has a metric of its own, outside of the module."""

    def __init__(self) -> None:
        from torchmetrics import SumMetric

        self.count = SumMetric()
        self.gathered: Any = None

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *args: Any) -> None:
        self.count.update(len(batch[0]))

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("count in callback", self.count.compute())
        self.count.reset()
        self.gathered = pl_module.all_gather(torch.tensor(trainer.global_rank))


class Counting(nets.Classifier):
    """Notes which samples it sees, and scores them with metrics."""

    def __init__(self) -> None:
        from torchmetrics import MeanMetric, SumMetric
        from torchmetrics.classification import MulticlassAccuracy

        super().__init__()
        self.accuracy = MulticlassAccuracy(num_classes=4)
        self.count = SumMetric()
        self.confidence = MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        outputs = self(images)
        self.accuracy(outputs, labels)
        self.count(len(labels))
        self.confidence(outputs.softmax(dim=1).max(dim=1).values)
        self.log("accuracy", self.accuracy)
        self.log("count", self.count)
        self.log("confidence", self.confidence)
        self.log("loss", self._loss(outputs, labels), sync_dist=True, batch_size=len(labels))

    test_step = validation_step


@pytest.mark.case("C39")
def test_case_c39_each_sample_of_validation_and_test_counts_once() -> None:
    expected = _evaluate(None, 1)
    assert [values["count"] for values in expected] == [7, 7]
    assert expected[0]["count in callback"] == 7
    for rank, (values, gathered) in enumerate(run_ranks(4, _evaluate_rank)):
        assert values == [pytest.approx(run, rel=1e-6) for run in expected]
        assert gathered == [rank % 2, rank % 2 + 2], "the ranks of the same stage"


def _evaluate_rank(rank: int, world: int) -> Any:
    counter = CountsInCallback()
    return _evaluate(make_strategy(GRID), 2, counter), counter.gathered.tolist()


def _evaluate(strategy: Any, replicas: int, counter: Any = None) -> list[dict[str, float]]:
    pl.seed_everything(1, verbose=False)
    module = Counting()
    trainer = make_trainer(CASE, strategy, 2 * replicas if replicas > 1 else 1, "", Record())
    trainer.callbacks.append(counter or CountsInCallback())
    seven = DataLoader(nets.Images(7), 4 // replicas)
    validated = trainer.validate(module, seven, verbose=False)
    tested = trainer.test(module, seven, verbose=False)
    return [dict(validated[0]), dict(tested[0])]


@pytest.mark.case("C48")
def test_case_c48_a_stream_is_shared_out_or_a_warning_says_that_it_is_not() -> None:
    results = run_ranks(4, _train_on_stream)
    for rank, (seen, warned) in enumerate(results):
        partner = results[rank ^ 1]
        assert seen == partner[0], "ranks of one replica see the same samples"
        assert bool(warned) == (rank == 0), "said once, on the rank that loads"
    whole, shared = zip(results[0][0], results[2][0], strict=True)
    assert whole[0] == whole[1] == list(range(8))
    assert sorted(shared[0] + shared[1]) == list(range(8))
    assert "ShardedIterable" in results[0][1][0]


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(8))


class NotesSamples(nets.Classifier):
    """Its batches are numbers of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.extra += batch.tolist()
        images = nets.Images(8)
        picked = [images[i] for i in batch.tolist()]
        return super().training_step(
            (torch.stack([x for x, _ in picked]), torch.stack([y for _, y in picked])), batch_idx
        )


def _train_on_stream(rank: int, world: int) -> Any:
    import warnings

    seen = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for stream in (Numbers(), ShardedIterable(range(8))):
            module = NotesSamples()
            make_trainer(CASE, make_strategy(GRID), world, "", Record()).fit(module, DataLoader(stream, 2))
            seen.append(module.extra)
    return seen, [str(w.message) for w in caught if "can't be divided among" in str(w.message)]


class LogsOnOneRank(nets.Classifier):
    """Logs a key on rank 0 only, before or after what all ranks log."""

    def __init__(self, *, sync: bool, first: bool = False) -> None:
        super().__init__()
        self.sync = sync
        self.first = first

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(batch[0]).square().mean()
        if self.global_rank == 0 and self.first:
            self.log("extra", 3.0, sync_dist=self.sync)
        self.log("train_loss", loss, sync_dist=True)
        if self.global_rank == 0 and not self.first:
            self.log("extra", 3.0, sync_dist=self.sync)
        return loss


@pytest.mark.case("C37")
def test_case_c37_a_key_that_one_replica_does_not_log_is_named() -> None:
    for before, after in run_ranks(2, _log_on_one_rank):
        assert "replica 0 reduces 'extra' (mean, shape ()); replica 1 reduces 'train_loss' (mean, shape ())" in before
        assert "replica 0 reduces 'extra' (mean, shape ()); replica 1 averages gradients" in after
        assert "log a key on every rank, or with sync_dist=False and rank_zero_only=True" in after


def _log_on_one_rank(rank: int, world: int) -> list[str]:

    # Not reduced: fine, and the value is the one that was logged. Within one replica nothing is reduced either.
    for layout, sync in ((Layout(1, 2), False), (Layout(2, 1), True)):
        trainer = make_trainer(CASE, make_strategy(layout), world, "", Record(), limit_train_batches=2)
        trainer.fit(LogsOnOneRank(sync=sync), loaders(CASE, layout.data)["train_dataloaders"])
        assert trainer.callback_metrics.get("extra") == (3.0 if rank == 0 else None)
    errors = []
    for first in (True, False):
        trainer = make_trainer(CASE, make_strategy(Layout(1, 2)), world, "", Record(), limit_train_batches=2)
        try:
            trainer.fit(LogsOnOneRank(sync=True, first=first), loaders(CASE, 2)["train_dataloaders"])
        except RuntimeError as error:
            errors.append(str(error))
    return errors
