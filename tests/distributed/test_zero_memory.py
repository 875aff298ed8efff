"""Bytes of parameters, gradients and optimizer states on each rank, counted, against the formulas of ZeRO."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_cnnpar import HybridStrategy
from lightning_cnnpar.data_parallel import sharding
from lightning_cnnpar.data_parallel.held_gradient import HeldGradient
from tests import nets
from tests.fitting import QUIET
from tests.ranks import run_ranks

WIDTH, DEPTH = 64, 24


class Deep(pl.LightningModule):
    """Equal layers, so that the largest unit is a small part. Counts bytes at the moments that matter."""

    def __init__(self, optimizer: Any = torch.optim.AdamW) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, WIDTH, 3, padding=1)]
        for _ in range(DEPTH):
            layers += [nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)]
        self.model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 4))
        self.make = optimizer
        self.count = sum(p.numel() for p in self.parameters())
        self.between: list[dict[str, float]] = []
        self.largest = {"parameters": 0.0, "gradients": 0.0}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        if batch_idx == 1:
            # Pieces are cut with the first step; from now on the gradients that are there together are counted.
            for parameter in self.parameters():
                parameter.register_post_accumulate_grad_hook(lambda _: self._look())
        return F.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters(), lr=1e-3)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pieces: Any = self.trainer.strategy._networks.pieces
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if pieces is not None:
            cut = pieces.sharding
            gradients = [slot.gradient if cut.is_whole else slot.parameter.grad for u in cut.units for slot in u.slots]
        optimizer = self.optimizers(use_pl_optimizer=False)
        states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim()]
        held = {"parameters": list(self.parameters()), "gradients": gradients, "states": states}
        self.between.append({kind: stored(tensors) / self.count for kind, tensors in held.items()})

    def _look(self) -> None:
        self.largest["parameters"] = max(self.largest["parameters"], stored(list(self.parameters())) / self.count)
        gradients = [p.grad for p in self.parameters() if not isinstance(p.grad, HeldGradient)]
        self.largest["gradients"] = max(self.largest["gradients"], stored(gradients) / self.count)


def stored(tensors: list[Any]) -> int:
    """Bytes of the memory behind tensors, each memory once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def _fit(rank: int, world: int, zero: int, optimizer: Any) -> tuple[dict[str, float], dict[str, float], float]:
    torch.manual_seed(0)
    sharding.SMALLEST_UNIT = 1
    module = Deep(optimizer)
    strategy = HybridStrategy(1, world, zero_stage=zero)
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, max_steps=3, accumulate_grad_batches=2, **QUIET
    )
    peak: list[float] = []

    class Peak(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            pieces = trainer.strategy._networks.pieces
            peak.append(0.0 if pieces is None else pieces.gathered_bytes / module.count)

    trainer.callbacks.append(Peak())
    trainer.fit(module, DataLoader(nets.Float32Images(24), 4 // world))
    return module.between[-1], module.largest, max(peak)


# Bytes for a parameter in float32: itself, its gradient at the end of the backward pass, its optimizer states.
FORMULAS: dict[int, Any] = {
    0: lambda n, s: (4, 4, s),
    1: lambda n, s: (4, 4, s / n),
    2: lambda n, s: (4, 4 / n, s / n),
    3: lambda n, s: (4 / n, 4 / n, s / n),
}


def sgd(parameters: Any, lr: float) -> Any:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


@pytest.mark.case("C21")
@pytest.mark.parametrize(
    ("world", "zero", "optimizer", "states"),
    [
        *((2, zero, torch.optim.AdamW, 8) for zero in (0, 1, 2, 3)),
        *((4, zero, torch.optim.AdamW, 8) for zero in (1, 2, 3)),
        (2, 1, sgd, 4),
        (2, 3, sgd, 4),
    ],
)
def test_bytes_on_each_rank(world: int, zero: int, optimizer: Any, states: int) -> None:
    parameters, gradients, optimized = FORMULAS[zero](world, states)
    for between, largest, gathered in run_ranks(world, _fit, zero, optimizer, timeout=100):
        assert between["parameters"] == pytest.approx(parameters, rel=0.02)
        assert between["states"] == pytest.approx(optimized, rel=0.02)
        # With stage 1, gradients are whole until the last backward pass before the step, and pieces after that.
        assert between["gradients"] == pytest.approx(gradients if zero != 1 else 4 / world, rel=0.02)
        unit = 4 / DEPTH
        if zero < 2:
            assert largest["gradients"] == pytest.approx(4, rel=0.02)
        else:
            # Gradients go as soon as they are reduced: those of a unit at a time are whole.
            assert largest["gradients"] <= 2.1 * unit
        assert gathered <= 2.1 * unit
        assert (gathered > 0) == (zero == 3)
