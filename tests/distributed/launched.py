"""A user's script, started by `test_launch.py` in every way that ranks can start.

python -m tests.distributed.launched STRATEGY DEVICES [--pipeline P] [--data D] [--fault KIND@RANK]
"""

import argparse
import os
import signal
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests import nets


class Faulty(nets.Classifier):
    """Raises, or kills its process, in the second step on one rank."""

    def __init__(self, fault: str | None) -> None:
        super().__init__(nets.plain())
        self.kind, _, rank = (fault or "none@-1").partition("@")
        self.rank = int(rank)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.global_rank == self.rank:
            if self.kind == "raise":
                raise ValueError("the user's own mistake")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy")
    parser.add_argument("devices", type=int)
    parser.add_argument("--options", default="{}")
    parser.add_argument("--fault")
    arguments = parser.parse_args()
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
        max_epochs=1,
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
        print(f"weight sum {sum(float(p.detach().sum()) for p in module.parameters()):.12f}", flush=True)
        print(f"train_loss {float(trainer.callback_metrics['train_loss']):.9f}", flush=True)


if __name__ == "__main__":
    main()
