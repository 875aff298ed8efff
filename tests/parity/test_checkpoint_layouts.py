"""A checkpoint is the file that one process would write, and any layout goes on from it with the same losses."""

import dataclasses
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests import nets
from tests.fitting import (
    Case,
    Layout,
    Record,
    assert_same_tensors,
    assert_same_tree,
    loaders,
    make_strategy,
    make_trainer,
)
from tests.ranks import run_ranks

# Of plain Lightning, in this process.
pytestmark = pytest.mark.filterwarnings("ignore")


class Everything(nets.Classifier):
    """Has all that a checkpoint may hold: groups, frozen and outside parameters, buffers, a scheduler, hyperparameters."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(nets.frozen_backbone())
        self.save_hyperparameters()
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        self.seen += 1
        loss = self._loss(self.model(images) * self.temperature, labels)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": [*others, self.temperature], "lr": 1e-2}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"note": "text", "weights": [self.model.head.weight.detach(), torch.ones(2)]}


CASE = Case(module=Everything, train=nets.images40, val=nets.images12)


@dataclasses.dataclass
class Continued:
    """What came after a checkpoint was loaded."""

    losses: list[float]
    state: dict[str, Tensor]
    step: int
    rate: float


def _train_and_save(layout: Layout | None, path: Path) -> None:
    pl.seed_everything(1, verbose=False)
    trainer = _trainer(layout, path.parent)
    trainer.fit(Everything(), **_loaders(layout))
    trainer.save_checkpoint(path)


def _continue(layout: Layout | None, path: Path) -> Continued:
    """Train three more steps."""
    pl.seed_everything(2, verbose=False)
    record = Record()
    trainer = _trainer(layout, path.parent, record, max_epochs=2, limit_train_batches=3)
    module = Everything()
    trainer.fit(module, **_loaders(layout), ckpt_path=path, weights_only=True)
    return Continued(
        losses=[values["train_loss"] for values in record.logged],
        state={name: tensor.clone() for name, tensor in module.state_dict().items()},
        step=trainer.global_step,
        rate=trainer.optimizers[0].param_groups[0]["lr"],
    )


def _trainer(layout: Layout | None, folder: Path, record: Record | None = None, **more: Any) -> pl.Trainer:
    strategy, world = (None, 1) if layout is None else (make_strategy(layout), layout.world)
    return make_trainer(CASE, strategy, world, str(folder), record or Record(), **more)


def _loaders(layout: Layout | None) -> dict[str, Any]:
    return loaders(CASE, 1 if layout is None else layout.data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has `alone.ckpt`, written by one process, and `grid.ckpt` and `zero.ckpt`, written by 2 x 2 ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    _train_and_save(None, folder / "alone.ckpt")
    run_ranks(4, _save_on_grid, folder)
    return folder


def _save_on_grid(rank: int, world: int, folder: Path) -> None:
    _train_and_save(Layout(2, 2), folder / "grid.ckpt")
    _train_and_save(Layout(2, 2, {"zero_stage": 2}), folder / "zero.ckpt")


@pytest.mark.case("C54")
@pytest.mark.parametrize("name", ["grid.ckpt", "zero.ckpt"])
def test_case_c54_the_file_is_the_one_of_a_single_process(folder: Path, name: str) -> None:
    alone, grid = folder / "alone.ckpt", folder / name
    assert_same_tree(torch.load(grid, weights_only=True), torch.load(alone, weights_only=True))
    assert grid.stat().st_size == pytest.approx(alone.stat().st_size, rel=0.02)
    loaded = Everything.load_from_checkpoint(grid, weights_only=True).double()
    assert loaded.hparams == {"width": 8}
    assert_same_tensors(loaded.state_dict(), torch.load(alone, weights_only=True)["state_dict"], 1e-6)


@pytest.mark.case("C54")
@pytest.mark.parametrize(
    "layout",
    [
        None,
        Layout(1, 1),
        Layout(4, 1),
        Layout(1, 2),
        Layout(2, 2),
        Layout(1, 2, {"zero_stage": 1}),
        Layout(2, 2, {"zero_stage": 3}),
    ],
    ids=["plain", "1x1", "4x1", "1x2", "2x2", "1x2-zero1", "2x2-zero3"],
)
def test_case_c54_any_layout_goes_on_with_the_same_losses(folder: Path, layout: Layout | None) -> None:
    expected = _continue(None, folder / "alone.ckpt")
    assert len(expected.losses) == 3
    assert expected.step == 8
    if layout is None:
        found = [_continue(None, folder / name) for name in ("grid.ckpt", "zero.ckpt")]
    else:
        files = [folder / "grid.ckpt", folder / "zero.ckpt", folder / "alone.ckpt"]
        found = [run for rank in run_ranks(layout.world, _continue_on_ranks, layout, files) for run in rank]
    for run in found:
        assert run.losses == pytest.approx(expected.losses, rel=1e-6)
        assert (run.step, run.rate) == (expected.step, expected.rate)
        assert_same_tensors(run.state, expected.state, 1e-10)


def _continue_on_ranks(rank: int, world: int, layout: Layout, files: list[Path]) -> list[Continued]:
    return [_continue(layout, file) for file in files]
