"""A user's script that gets a signal in the midst of training, started by `test_preemption.py`.

python -m tests.distributed.preempted METHOD DEVICES FOLDER [--wanted NAME@RANK@BATCH] [--options ...]
"""

import argparse
import os
import signal
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_cnnpar import HybridStrategy
from tests import nets

SLOW = 0.05


class Signalled(nets.Classifier):
    """Sends itself, or its parent, a signal while a batch is worked on."""

    def __init__(self, wanted: str | None) -> None:
        super().__init__(nets.plain())
        self.name, self.where, self.at = (wanted or "SIGTERM@-1@-1").split("@")

    def on_train_start(self) -> None:
        print(f"rank {self.global_rank} has pid {os.getpid()}, starts at step {self.global_step}", flush=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(SLOW)
        if batch_idx == int(self.at) and self.where in (str(self.global_rank), "all"):
            os.kill(os.getpid(), getattr(signal, self.name))
        if batch_idx == int(self.at) and self.where == "parent" and self.global_rank == 0:
            os.kill(os.getppid(), getattr(signal, self.name))
        return super().training_step(batch, batch_idx)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method")
    parser.add_argument("devices", type=int)
    parser.add_argument("folder")
    parser.add_argument("--wanted")
    parser.add_argument("--options", default="{}")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    method = "popen" if arguments.method == "torchrun" else arguments.method
    strategy = HybridStrategy(start_method=method, **eval(arguments.options))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        callbacks=[ModelCheckpoint(arguments.folder, every_n_train_steps=100)],
        enable_progress_bar=False,
        enable_model_summary=False,
        precision="64-true",
    )
    module = Signalled(arguments.wanted)
    trainer.fit(module, DataLoader(nets.Images(96), 8), ckpt_path="last")
    if trainer.is_global_zero:
        print(f"weight sum {sum(float(p.detach().sum()) for p in module.parameters()):.5f}", flush=True)
        print(f"ended at epoch {trainer.current_epoch}", flush=True)


if __name__ == "__main__":
    main()
