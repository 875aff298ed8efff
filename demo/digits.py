"""Trains a small ResNet on handwritten digits: in one process, then over 2 pipeline stages x 2 replicas.

    make demo

Both runs see the same global batches and start from the same weights. Nothing in `Digits` knows of the layout.
"""

import os
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("WANDB_SILENT", "true")

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_cnnpar import HybridStrategy

STAGES, REPLICAS = 2, 2
GLOBAL_BATCH = 64
EPOCHS = 30
SEED = 1
WANTED_ACCURACY, ALLOWED_DIFFERENCE = 97.0, 0.5
RUNS = Path(__file__).parent / "runs"


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(4, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(4, outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        return F.relu(y + self.shortcut(x))


class Digits(LightningModule):
    """An ordinary module: a network, its steps, its optimizer."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            Block(16, 16),
            Block(16, 32, stride=2),
            Block(32, 32),
            Block(32, 64, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )
        self.val_accuracy = MulticlassAccuracy(10, average="micro")
        self.test_accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(jitter(images)), labels, label_smoothing=0.1)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.val_accuracy(self.net(images), labels)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.test_accuracy(self.net(images), labels)
        self.log("test_accuracy", self.test_accuracy)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def jitter(images: Tensor) -> Tensor:
    """Turn, scale and shift each image a little; every rank of a replica draws the same."""
    angle, scale, x, y = ((torch.rand(4, len(images)) - 0.5) * torch.tensor([[0.5], [0.2], [0.3], [0.3]])).unbind()
    cosine, sine = (1 + scale) * angle.cos(), (1 + scale) * angle.sin()
    maps = torch.stack([cosine, -sine, x, sine, cosine, y], dim=1).view(-1, 2, 3)
    return F.grid_sample(images, F.affine_grid(maps, list(images.shape), align_corners=False), align_corners=False)


class Measurements(Callback):
    """Speed of training and peak memory of every rank."""

    def __init__(self) -> None:
        self.images = 0
        self.seconds = 0.0
        self.memory: list[int] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        # The first epoch starts workers and cuts the network; it does not count.
        if trainer.current_epoch > 0:
            self.images += GLOBAL_BATCH

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch > 0:
            self.seconds += time.perf_counter() - self._begin

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        peak = peak_memory()
        self.memory = [peak] * trainer.world_size
        if dist.is_initialized():
            dist.all_gather_object(self.memory, peak)

    @property
    def speed(self) -> float:
        """Images per second."""
        return self.images / self.seconds


def peak_memory() -> int:
    """Most memory that this process has had so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def loaders(batch_size: int) -> dict[str, DataLoader[Any]]:
    """Scikit-learn's digits, 8 x 8 pixels, in three parts."""
    digits = load_digits()
    images = torch.from_numpy(digits.images / 16.0).float().unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    rest, test = train_test_split(torch.arange(len(labels)), test_size=600, stratify=labels, random_state=0)
    train, val = train_test_split(rest, test_size=173, stratify=labels[rest], random_state=0)
    parts = {"train": train, "val": val, "test": test}
    return {
        name: DataLoader(
            TensorDataset(images[part], labels[part]), batch_size, shuffle=name == "train", drop_last=name == "train"
        )
        for name, part in parts.items()
    }


def train(replicas: int = 1, logger: Logger | bool = False, **layout: Any) -> tuple[float, Measurements]:
    """Train and test; returns the test accuracy in percent."""
    seed_everything(SEED, verbose=False)
    data = loaders(GLOBAL_BATCH // replicas)
    steps = EPOCHS * (len(data["train"]) // replicas)
    measured = Measurements()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        callbacks=[measured],
        logger=logger,
        log_every_n_steps=5,
        enable_checkpointing=False,
        enable_model_summary=False,
        **layout,
    )
    model = Digits(steps)
    trainer.fit(model, data["train"], data["val"])
    (result,) = trainer.test(model, data["test"], verbose=False)
    return 100 * result["test_accuracy"], measured


def main() -> int:
    """Both runs and the table. With four ranks this script runs four times; rank 0 speaks."""
    for notice in ("does not have many workers", "LeafSpec"):
        warnings.filterwarnings("ignore", f".*{notice}.*")
    console = Console(quiet=rank_zero_only.rank != 0)
    first, libraries = rank_zero_only.rank == 0, peak_memory()
    if first:
        console.rule("One process")
        alone, alone_measured = train(devices=1)
        console.rule(f"{STAGES} stages x {REPLICAS} replicas")

    strategy = HybridStrategy(pipeline_parallel_size=STAGES, data_parallel_size=REPLICAS)
    logger = WandbLogger(project="digits", save_dir=RUNS, offline=True)
    accuracy, measured = train(REPLICAS, logger, strategy=strategy, devices=STAGES * REPLICAS)
    if not first:
        return 0

    console.rule("Result")
    table = Table("layout", "test accuracy", "images/s", "peak MiB of each rank", "bubble")
    bubble = (STAGES - 1) / (strategy.num_microbatches + STAGES - 1)
    table.add_row("one process", *row(alone, alone_measured), "0 %")
    table.add_row(f"{STAGES} x {REPLICAS} ranks", *row(accuracy, measured), f"{100 * bubble:.0f} %")
    console.print(table)
    console.print(f"Python and its libraries take {libraries} MiB of each rank's memory.")
    console.print(f"W&B run, offline: {Path(logger.experiment.dir).parent}", soft_wrap=True)
    return check(alone, accuracy)


def row(accuracy: float, measured: Measurements) -> tuple[str, str, str]:
    """Cells of the closing table."""
    return f"{accuracy:.2f} %", f"{measured.speed:,.0f}", " ".join(map(str, measured.memory))


def check(alone: float, parallel: float) -> int:
    """Exit status of the demo: whether it showed what it promises."""
    if min(alone, parallel) < WANTED_ACCURACY or abs(alone - parallel) > ALLOWED_DIFFERENCE:
        print(
            f"Expected at least {WANTED_ACCURACY} % from both runs, {ALLOWED_DIFFERENCE} points apart at most;"
            f" got {alone:.2f} % and {parallel:.2f} %.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
