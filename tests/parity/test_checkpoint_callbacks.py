"""Callbacks that watch, keep, average or stop do on every rank what they do in one process, and write the same files."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch.utils.data import DataLoader

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

EPOCHS = 5
# BatchNorm is exact with one microbatch.
WHOLE = {"num_microbatches": 1}


class Unsteady(nets.Classifier):
    """Its validation loss falls and rises."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(norm=True, blocks=2), optimizer=too_fast)


def too_fast(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def keep_best(folder: Path) -> list[pl.Callback]:
    names = {"dirpath": folder, "filename": "{epoch}-{step}", "monitor": "val_loss"}
    return [
        ModelCheckpoint(**names, save_top_k=2, save_last=True),
        ModelCheckpoint(dirpath=folder, filename="often-{step}", every_n_train_steps=4, save_top_k=-1),
        EarlyStopping("val_loss", patience=1),
    ]


def average(folder: Path) -> list[pl.Callback]:
    kept = ModelCheckpoint(dirpath=folder, filename="ema-{epoch}", save_top_k=-1)
    return [EMAWeightAveraging(decay=0.9, update_starting_at_step=2), kept]


def average_late(folder: Path) -> list[pl.Callback]:
    return [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=1)]


CALLBACKS: dict[str, Callable[[Path], list[pl.Callback]]] = {"best": keep_best, "ema": average, "swa": average_late}


def fit(name: str, folder: Path, layout: Layout | None, resume: Path | None = None) -> dict[str, Any]:
    """Train with the callbacks of that name; what is left of it, beside the files in `folder`."""
    pl.seed_everything(1, verbose=False)
    module = Unsteady()
    strategy, world = (None, 1) if layout is None else (make_strategy(layout), layout.world)
    record = Record()
    case = Case(
        module=Unsteady,
        train=nets.images40,
        val=nets.images12,
        callbacks=functools.partial(CALLBACKS[name], folder),
        trainer={"max_epochs": EPOCHS, "enable_checkpointing": True, "sync_batchnorm": True},
    )
    replicas = 1 if layout is None else layout.data
    trainer = make_trainer(case, strategy, world, str(folder), record)
    trainer.fit(module, **loaders(case, replicas), ckpt_path=resume)
    found: dict[str, Any] = {
        "state": dict(module.state_dict()),
        "losses": [float(values["train_loss"]) for values in record.logged],
        "epoch": trainer.current_epoch,
        "callbacks": [dict(callback.state_dict()) for callback in trainer.callbacks],
    }
    if name == "best":
        found["test"] = trainer.validate(
            dataloaders=DataLoader(nets.Images(8), 8 // replicas), ckpt_path="best", verbose=False
        )
        found["best state"] = dict(module.state_dict())
    return found


@functools.cache
def alone(folder: Path) -> dict[str, dict[str, Any]]:
    return {name: fit(name, folder / name, None) for name in CALLBACKS}


def _fit_all(rank: int, world: int, layout: Layout, folder: Path) -> dict[str, dict[str, Any]]:
    return {name: fit(name, folder / name, layout) for name in CALLBACKS}


@pytest.mark.case("C44")
@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, 1, WHOLE),
        Layout(2, 2, WHOLE),
        Layout(1, 2, {**WHOLE, "zero_stage": 2}),
        Layout(2, 2, {**WHOLE, "zero_stage": 3}),
    ],
    ids=["2x1", "2x2", "1x2-zero2", "2x2-zero3"],
)
def test_callbacks_leave_what_they_leave_in_one_process(
    layout: Layout, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "alone"
    expected = alone(folder)
    # The scenario shows something: it stops early, and the best epoch isn't the last.
    assert expected["best"]["epoch"] < EPOCHS
    results = run_ranks(layout.world, _fit_all, layout, tmp_path, timeout=150)
    for found in results:
        for name in CALLBACKS:
            assert_same_tree(_portable(found[name], tmp_path), _portable(expected[name], folder), name)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.ckpt"))
    assert len(files) >= 8
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()) == files
    for file in files:
        own, other = (torch.load(place / file, weights_only=True) for place in (tmp_path, folder))
        assert_same_tree(_portable(own, tmp_path), _portable(other, folder), str(file))


def _portable(value: Any, folder: Path) -> Any:
    """The same with paths relative to the run's folder."""
    if isinstance(value, dict):
        return {_portable(key, folder): _portable(entry, folder) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_portable(entry, folder) for entry in value]
    return value.replace(str(folder), "") if isinstance(value, str) else value


@pytest.mark.case("C44")
def test_case_c44_averages_go_on_in_another_layout(tmp_path: Path) -> None:
    folder = tmp_path / "ema"
    fit("ema", folder, None)
    resume = folder / "ema-epoch=1.ckpt"
    expected = fit("ema", tmp_path / "again", None, resume)
    for found in run_ranks(2, _resume, tmp_path / "pair", resume):
        assert len(found["losses"]) == 15
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert_same_tensors(found["state"], expected["state"], 1e-10)


def _resume(rank: int, world: int, folder: Path, resume: Path) -> dict[str, Any]:
    return fit("ema", folder, Layout(2, 1, WHOLE), resume)
