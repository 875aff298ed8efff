"""What is drawn at random differs between replicas and steps, and is the same on all stages of a replica."""

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests import nets
from tests.fitting import (
    Case,
    Layout,
    Record,
    assert_same,
    fit_alone,
    fit_on_ranks,
    make_strategy,
    make_trainer,
)
from tests.ranks import run_ranks

# Of plain Lightning, in this process.
pytestmark = pytest.mark.filterwarnings("ignore")

CASE = Case(module=nets.Classifier, train=nets.images40, val=nets.images12)


class Noted(nets.Classifier):
    """Notes what it draws in each step from every generator, and the random numbers that come with the data."""

    def __init__(self) -> None:
        network = nets.plain()
        network.insert(4, torch.nn.Dropout(0.2))
        super().__init__(network)
        self.extra: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        *inputs, drawn = batch
        self.extra.append([*torch.randn(1).tolist(), random.random(), float(np.random.rand()), *drawn.tolist()])
        return super().training_step(inputs, batch_idx)


class Augmented(nets.Images):
    """Adds noise of its own in the loader."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        noise = torch.rand(())
        return image + noise, label, noise


@pytest.mark.case("C33")
def test_case_c33_replicas_draw_differently_and_stages_alike() -> None:
    by_rank = run_ranks(4, _draw)
    assert by_rank[0] == by_rank[1]
    assert by_rank[2] == by_rank[3]
    drawn = [value for rank in (0, 2) for step in by_rank[rank] for value in step]
    assert len(set(drawn)) == len(drawn), "no value comes twice: in no step, epoch or replica"


def _draw(rank: int, world: int) -> list[list[float]]:
    # Whatever the user seeded, or did not.
    pl.seed_everything(1, workers=True, verbose=False)
    torch.manual_seed(rank)
    module = Noted()
    trainer = make_trainer(CASE, make_strategy(Layout(2, 2)), world, "", Record(), max_epochs=2)
    trainer.fit(module, DataLoader(Augmented(12), 4, num_workers=1, multiprocessing_context="fork"))
    return module.extra


class Mixed(nets.Classifier):
    """Mixes samples before the step, and once more in it."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        images, labels = batch
        flip = torch.rand(len(images)) < 0.5
        return torch.where(flip.view(-1, 1, 1, 1), images.flip(3), images), labels

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        order = torch.randperm(len(images))
        share = np.random.beta(1.0, 1.0)
        outputs = self.model(share * images + (1 - share) * images[order])
        loss = share * self._loss(outputs, labels) + (1 - share) * self._loss(outputs, labels[order])
        self.log("train_loss", loss)
        return loss


@pytest.mark.case("C34")
def test_case_c34_mixup_mixes_inputs_and_labels_alike_on_all_stages() -> None:
    mixed = Case(module=Mixed, train=nets.images40, trainer={"max_epochs": 2}, shuffle=True)
    assert_same(fit_on_ranks(mixed, Layout(2, 1)), fit_alone(mixed))
