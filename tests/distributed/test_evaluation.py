"""Validate, test and predict, before, between and after training, with the same Trainer."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader

from tests import nets
from tests.fitting import Case, Layout, Record, assert_same_tensors, loaders, make_strategy, make_trainer
from tests.ranks import run_ranks

# Of plain Lightning, in this process.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.case("C16")]


class Predictor(nets.Classifier):
    """Predicts with the network called as a whole, and trains with the submodule."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(norm=True))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("test_loss", self._loss(self(images), labels), sync_dist=True, batch_size=len(labels))

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        images, _ = batch
        return {"scores": self(images), "batch": batch_idx, "training": self.training, "grad": torch.is_grad_enabled()}


class Writer(BasePredictionWriter):
    """Notes what it is told to write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.by_index: dict[int, Tensor] = {}
        self.batches: list[list[int]] = []
        self.epoch: Any = None

    def write_on_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        assert len(batch_indices) == len(prediction["scores"])
        self.by_index.update(zip(batch_indices, prediction["scores"], strict=True))
        self.batches.append(list(batch_indices))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epoch = batch_indices


CASE = Case(module=Predictor, train=nets.images40, val=nets.images12)


def run(layout: Layout | None) -> dict[str, Any]:
    """Everything a Trainer can do, in a row."""
    pl.seed_everything(1, verbose=False)
    module, writer = Predictor(), Writer()
    strategy, world, replicas = None, 1, 1
    if layout is not None:
        strategy, world, replicas = make_strategy(layout), layout.world, layout.data
    trainer = make_trainer(CASE, strategy, world, "", Record(), limit_train_batches=2, sync_batchnorm=True)
    trainer.callbacks.append(writer)
    ten = DataLoader(nets.Images(10), 8 // replicas)
    found: dict[str, Any] = {"predicted before": trainer.predict(module, ten)}
    found["validated before"] = trainer.validate(module, ten, verbose=False)
    trainer.fit(module, **loaders(CASE, replicas))
    found["state"] = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    found["tested"] = trainer.test(module, ten, verbose=False)
    found["predicted"] = trainer.predict(module, ten)
    found["written"] = writer.by_index, writer.batches, writer.epoch
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, **loaders(CASE, replicas))
    found["step"] = trainer.global_step
    found["final state"] = dict(module.state_dict())
    found["validated"] = trainer.validate(module, ten, verbose=False)
    # The module is the user's own again: plain calls, on this rank alone.
    with torch.no_grad():
        found["called"] = module.eval()(torch.ones(2, 3, 8, 8, dtype=torch.float64))
    return found


def _run_rank(rank: int, world: int, layouts: list[Layout]) -> list[dict[str, Any]]:
    return [run(layout) for layout in layouts]


@pytest.fixture(scope="module")
def on_ranks() -> list[list[dict[str, Any]]]:
    """By rank, then by layout."""
    options = {"num_microbatches": 1}
    return run_ranks(4, _run_rank, [Layout(4, 1, options), Layout(2, 2, options)])


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run(None)


@pytest.mark.parametrize("layout", [0, 1], ids=["4x1", "2x2"])
def test_one_trainer_runs_everything_in_a_row(
    layout: int, on_ranks: list[list[dict[str, Any]]], alone: dict[str, Any]
) -> None:
    for by_layout in on_ranks:
        found = by_layout[layout]
        for key in ("validated before", "tested", "validated"):
            assert found[key] == [pytest.approx(alone[key][0], rel=1e-6)], key
        assert_same_tensors(found["state"], alone["state"], 1e-10)
        assert_same_tensors(found["final state"], alone["final state"], 1e-10)
        assert found["step"] == 4
        assert torch.allclose(found["called"], alone["called"], atol=1e-10)


def test_predict_returns_the_batches_of_one_process_on_every_rank(
    on_ranks: list[list[dict[str, Any]]], alone: dict[str, Any]
) -> None:
    for found, _ in on_ranks:
        for key in ("predicted before", "predicted"):
            assert len(found[key]) == len(alone[key]) == 2
            for own, other in zip(found[key], alone[key], strict=True):
                assert own == {**other, "scores": own["scores"]}
                assert not own["scores"].requires_grad
                assert torch.allclose(own["scores"], other["scores"], atol=1e-10)
        assert found["written"][1:] == alone["written"][1:]


def test_replicas_predict_each_sample_once_and_know_its_index(
    on_ranks: list[list[dict[str, Any]]], alone: dict[str, Any]
) -> None:
    expected, _, _ = alone["written"]
    written = [found["written"][0] for _, found in on_ranks]
    for rank in (0, 2):
        assert written[rank].keys() == written[rank + 1].keys(), "ranks of one replica write the same samples"
    assert written[0].keys().isdisjoint(written[2])
    assert written[0].keys() | written[2].keys() == expected.keys() == set(range(10))
    for by_index in written:
        for index, scores in by_index.items():
            assert torch.allclose(scores, expected[index], atol=1e-10), index
    for _, found in on_ranks:
        assert found["written"][2] == [found["written"][1][len(found["predicted before"]) :]]
