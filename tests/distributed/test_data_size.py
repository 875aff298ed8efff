"""What Lightning counts, it counts by replicas: turning the pipeline on changes no learning rate, length or throughput."""

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary, ThroughputMonitor, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torchvision.models import resnet18

from tests import nets
from tests.fitting import Case, Layout, Record, loaders, make_strategy, make_trainer
from tests.ranks import run_ranks

# Of plain Lightning, in this process.
pytestmark = pytest.mark.filterwarnings("ignore")


class OneCycle(nets.Classifier):
    """Its schedule spans the run."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Rates(pl.Callback):
    """Notes learning rates."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def _facts(rank: int, world: int, layout: Layout | None, folder: Path) -> dict[str, Any]:
    case = Case(module=OneCycle, train=nets.images40, val=nets.images12)
    pl.seed_everything(1, verbose=False)
    strategy = None if layout is None else make_strategy(layout)
    replicas = 1 if layout is None else layout.data
    trainer = make_trainer(
        case,
        strategy,
        world,
        str(folder),
        Record(),
        accumulate_grad_batches=2,
        max_epochs=2,
        log_every_n_steps=2,
        logger=CSVLogger(folder),
    )
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=3)
    rates, bar = Rates(), TQDMProgressBar(leave=True)
    trainer.callbacks += [monitor, rates, bar, ModelSummary(max_depth=1), RichModelSummary(max_depth=1)]
    trainer.fit(OneCycle(), **loaders(case, replicas))
    return {
        "rates": rates.rates,
        "batches": (trainer.num_training_batches, trainer.num_val_batches, trainer.estimated_stepping_batches),
        "bar": (bar.total_train_batches, bar.is_enabled),
        "sampler": None if strategy is None else strategy.distributed_sampler_kwargs,
    }


@pytest.mark.case("C45")
def test_case_c45_the_pipeline_changes_no_count_and_no_rate(tmp_path: Path) -> None:
    expected = _facts(0, 1, None, tmp_path / "alone")
    for layout in (Layout(2, 1), Layout(2, 2)):
        folder = tmp_path / f"{layout.pipeline}x{layout.data}"
        for rank, facts in enumerate(run_ranks(layout.world, _facts, layout, folder)):
            assert facts["sampler"] == {"num_replicas": layout.data, "rank": rank // 2}
            assert facts["rates"] == pytest.approx(expected["rates"])
            assert facts["batches"] == expected["batches"]
            assert facts["bar"] == (expected["bar"][0], rank == 0)
        rows = _throughput(folder)
        assert len(rows) == 3
        for row in rows:
            # One replica is one device in these terms: there is nothing to sum.
            whole = float(row.get("train/samples_per_sec") or row["train/device/samples_per_sec"])
            assert whole / float(row["train/device/samples_per_sec"]) == pytest.approx(layout.data)


def _throughput(folder: Path) -> list[dict[str, str]]:
    (file,) = folder.rglob("metrics.csv")
    with file.open() as lines:
        return [row for row in csv.DictReader(lines) if row.get("train/device/samples_per_sec")]


# ---- precision -------------------------------------------------------------------------------------------------------


class ResNet(nets.Classifier):
    """Notes the dtypes that BatchNorm meets."""

    def __init__(self) -> None:
        network = resnet18(num_classes=4)
        super().__init__(network)
        self.extra: set[str] = set()
        for layer in network.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.register_forward_hook(self._note)

    def _note(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        self.extra.add(f"{inputs[0].dtype} -> {layer.weight.dtype}, {layer.running_mean.dtype}")


@pytest.mark.case("C30")
def test_case_c30_batch_norm_stays_float32_in_mixed_precision(tmp_path: Path) -> None:
    for met, dtypes in run_ranks(2, _mixed, tmp_path):
        assert met == {"torch.bfloat16 -> torch.float32, torch.float32"}
        assert dtypes == {torch.float32, torch.int64}
    saved = torch.load(tmp_path / "mixed.ckpt", weights_only=True)["state_dict"]
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32, torch.int64}
    assert int(saved["model.layer4.1.bn2.num_batches_tracked"]) == 3


def _mixed(rank: int, world: int, folder: Path) -> Any:
    case = Case(module=ResNet, train=float32_images, batch=4)
    trainer = make_trainer(case, make_strategy(Layout(2, 1)), world, "", Record(), precision="bf16-mixed")
    module = ResNet()
    trainer.fit(module, **loaders(case, 1))
    assert trainer.global_step == 3
    trainer.save_checkpoint(folder / "mixed.ckpt")
    return module.extra, {tensor.dtype for tensor in module.state_dict().values()}


def float32_images() -> Any:
    return nets.Float32Images(12, size=32)
