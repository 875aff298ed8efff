"""A user's script, started by `test_launch.py` in every way that ranks can start.

python -m tests.distributed.launched STRATEGY DEVICES [--options ...] [--fits N] [--fault KIND@RANK]
"""

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests import nets


class Faulty(nets.Classifier):
    """Raises, or kills its process, in the second epoch on one rank."""

    def __init__(self, fault: str | None) -> None:
        super().__init__(nets.plain())
        self.kind, _, rank = (fault or "none@-1").partition("@")
        self.rank = int(rank)

    def on_fit_start(self) -> None:
        print(f"rank {self.global_rank} has pid {os.getpid()}", flush=True)
        print(f"listens on {sorted(listening())}", flush=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch == 1 and batch_idx == 1 and self.global_rank == self.rank:
            print(f"fault at {time.time()}", flush=True)
            if self.kind == "raise":
                raise ValueError("the user's own mistake")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0 and self.global_rank == 0:
            print(f"train_loss {float(self.trainer.callback_metrics['train_loss']):.6f}", flush=True)


def listening() -> set[str]:
    """Addresses, in hexadecimal as the kernel writes them, on which this process accepts connections."""
    links = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    sockets = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    tables = [Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and line[9] in sockets}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy")
    parser.add_argument("devices", type=int)
    parser.add_argument("--options", default="{}")
    parser.add_argument("--fits", type=int, default=1)
    parser.add_argument("--fault")
    arguments = parser.parse_args()
    for _ in range(arguments.fits):
        fit(arguments)


def fit(arguments: argparse.Namespace) -> None:
    """Train once, and say what came out."""
    torch.manual_seed(1)
    strategy: Any = arguments.strategy
    options = eval(arguments.options)
    if options:
        from lightning_cnnpar import HybridStrategy

        strategy = HybridStrategy(**options)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy=strategy,
        max_epochs=1 if arguments.fault is None else 2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        precision="64-true",
    )
    module = Faulty(arguments.fault)
    batch = 8 // (options.get("data_parallel_size", arguments.devices))
    trainer.fit(module, DataLoader(nets.Images(40), batch))
    if trainer.is_global_zero:
        print(f"{type(trainer.strategy).__name__} of {trainer.world_size}", flush=True)
        # With spawn and fork, the main process gets back what its own module holds, which is float32.
        print(f"weight sum {sum(float(p.detach().sum()) for p in module.parameters()):.5f}", flush=True)


if __name__ == "__main__":
    main()
