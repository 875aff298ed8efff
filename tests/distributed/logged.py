"""A user's script that logs to a CSV file, TensorBoard and W&B (offline), started by `test_loggers.py`.

python -m tests.distributed.logged FOLDER
"""

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cnnpar import HybridStrategy
from tests import nets


class Logging(nets.Classifier):
    """Logs in every way."""

    def __init__(self, width: int = 3) -> None:
        from torchmetrics.classification import MulticlassAccuracy

        super().__init__(nets.Residual())
        self.save_hyperparameters()
        self.accuracy = MulticlassAccuracy(num_classes=4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        outputs = self.model(images)
        loss = self._loss(outputs, labels)
        self.accuracy(outputs, labels)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log_dict(
            {"largest": outputs.max(), "last": outputs.new_tensor(batch_idx)}, reduce_fx="max", sync_dist=True
        )
        self.log("samples", float(len(labels)), reduce_fx="sum", sync_dist=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        if self.global_rank == 0:
            self.logger.log_metrics({"own": batch_idx * 2.0}, step=self.global_step)
        return loss


def train(folder: Path, strategy: Any, devices: int, replicas: int) -> None:
    """Train two epochs and close the loggers."""
    import wandb

    os.environ["WANDB_SILENT"] = "true"
    pl.seed_everything(1, verbose=False)
    loggers = [
        CSVLogger(folder, name="csv"),
        TensorBoardLogger(folder, name="tensorboard"),
        WandbLogger(name="run", save_dir=folder, offline=True, project="tests"),
    ]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=2,
        logger=loggers,
        log_every_n_steps=1,
        callbacks=[LearningRateMonitor()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        precision="64-true",
        default_root_dir=folder,
    )
    trainer.fit(Logging(), DataLoader(nets.Images(16), 8 // replicas), DataLoader(nets.Images(7), 4 // replicas))
    wandb.finish()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), HybridStrategy(2, 2), 4, 2)
