"""Test accuracy with compressed gradients: handwritten digits, two replicas, several seeds.

    python -m benchmarks.compression_accuracy [--epochs 20] [--seeds 3] [--codecs int8 onebit ...] [--output FILE]

Prints one JSON object a line: a codec, with or without error feedback, the bytes against plain gradients over the whole
run, the accuracy in percent and its difference to plain gradients, each a mean over the seeds. All runs of a seed start
from the same weights and see the same batches.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.two_ranks import run_two_ranks
from lightning_cnnpar import HybridStrategy
from lightning_cnnpar.compression import Compressor, OneBit, PowerSGD, TopK, from_name

CODECS: dict[str, Compressor | None] = {
    "none": None,
    **{name: from_name(name) for name in ("bf16", "int8", "int4", "int2")},
    "onebit": OneBit(warmup_steps=20),
    "topk": TopK(ratio=0.01, warmup_steps=20),
    "topk 0.1 %": TopK(ratio=0.001),
    "topk 0.1 %, ramp": TopK(ratio=0.001, warmup_steps=20, ramp_steps=80),
    "topk 0.1 %, ramp, momentum": TopK(ratio=0.001, warmup_steps=20, ramp_steps=80, momentum=0.9),
    "powersgd": PowerSGD(rank=2),
}
BATCH = 64


def network() -> nn.Module:
    """A small residual-free CNN of 74,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False), nn.GroupNorm(4, 64), nn.ReLU(),
        nn.Conv2d(64, 96, 3, stride=2, padding=1, bias=False), nn.GroupNorm(4, 96), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10),
    )  # fmt: skip


class Digits(pl.LightningModule):
    """SGD with momentum and a cosine schedule.

    Args:
        epochs: Length of the schedule.
        momentum: Of the optimizer.
    """

    def __init__(self, epochs: int, momentum: float = 0.9) -> None:
        super().__init__()
        self.net = network()
        self.momentum = momentum
        self.epochs = epochs
        self.losses: list[float] = []
        self._epoch: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross entropy."""
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self._epoch.append(float(loss))
        return loss

    def on_train_epoch_end(self) -> None:
        """Note the epoch's mean loss."""
        self.losses.append(statistics.mean(self._epoch))
        self._epoch = []

    def configure_optimizers(self) -> Any:
        """SGD with momentum."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=self.momentum, weight_decay=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)]


def data() -> tuple[TensorDataset, Tensor, Tensor]:
    """Training set, test images, test labels."""
    digits = load_digits()
    images = torch.from_numpy(digits.images / 16.0).float().unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1280], order[1280:]
    return TensorDataset(images[train], labels[train]), images[test], labels[test]


def train(codec: Compressor | None, seed: int, epochs: int) -> dict[str, Any]:
    """One run on this rank."""
    pl.seed_everything(seed, verbose=False)
    train_set, images, labels = data()
    strategy = HybridStrategy(1, 2, compression=codec)
    sent = Sent()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        callbacks=[sent],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    corrected = isinstance(codec, TopK) and codec.momentum
    module = Digits(epochs, momentum=0.0 if corrected else 0.9)
    trainer.fit(module, DataLoader(train_set, BATCH // 2, shuffle=True))
    module.eval()
    with torch.no_grad():
        accuracy = (module.net(images).argmax(1) == labels).float().mean()
    return {"accuracy": 100 * float(accuracy), "ratio": sent.ratio, "losses": module.losses}


class Sent(pl.Callback):
    """Notes bytes sent against those of plain gradients."""

    ratio = 1.0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Note them."""
        engine = trainer.strategy.compression_engine
        self.ratio = 1.0 if engine is None else engine.statistics.ratio


def _rank(rank: int, put: Callable[[Any], None], jobs: Sequence[tuple[Compressor | None, int]], epochs: int) -> None:
    for codec, seed in jobs:
        result = train(codec, seed, epochs)
        if rank == 0:
            put(result)


def main() -> None:
    """Run all and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), choices=list(CODECS))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows: list[tuple[str, bool, Compressor | None]] = []
    for name in arguments.codecs:
        codec = CODECS[name]
        rows.append((name, codec is not None, codec))
        if codec is not None and name in ("int4", "int2", "onebit", "topk", "powersgd"):
            rows.append((name, False, dataclasses.replace(codec, error_feedback=False)))
    jobs = [(codec, seed) for _, _, codec in rows for seed in range(arguments.seeds)]
    results = iter(run_two_ranks(_rank, jobs, arguments.epochs, count=len(jobs)))
    dense: list[float] = []
    lines = []
    for name, feedback, _ in rows:
        runs = [next(results) for _ in range(arguments.seeds)]
        accuracies = [run["accuracy"] for run in runs]
        dense = dense or accuracies
        lines.append(
            {
                "codec": name,
                "error feedback": feedback,
                "bytes": round(runs[0]["ratio"], 4),
                "accuracy": round(statistics.mean(accuracies), 2),
                "difference": round(statistics.mean(a - d for a, d in zip(accuracies, dense, strict=True)), 2),
                "losses": [
                    round(statistics.mean(epoch), 4) for epoch in zip(*(run["losses"] for run in runs), strict=True)
                ],
            }
        )
        print(json.dumps({key: value for key, value in lines[-1].items() if key != "losses"}), flush=True)
    if arguments.output is not None:
        arguments.output.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
