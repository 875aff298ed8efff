"""A rank holds its share: parameters, gradients and optimizer state are counted on every rank."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_cnnpar import HybridStrategy
from lightning_cnnpar.partition.foreign import is_foreign
from tests import nets
from tests.fitting import QUIET
from tests.ranks import run_ranks


class VGGLike(pl.LightningModule):
    """Early layers cost time, late ones hold parameters. Counts what this rank holds at the end of each step."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, repeat in ((16, 2), (32, 6), (32, 6), (32, 4)):
            for _ in range(repeat):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        layers[-1] = nn.AdaptiveAvgPool2d(1)
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        self.held: list[int] = []

    def forward(self, x: Tensor) -> Any:
        return self.classifier(self.features(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        tensors = [p for p in self.parameters() if not is_foreign(p)]
        tensors += [p.grad for p in tensors if p.grad is not None]
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor) and value.numel() > 1]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        self.held.append(sum(storages.values()))


def _fit(rank: int, world: int, pipeline: int, balance: str) -> int:
    torch.manual_seed(0)
    module = VGGLike()
    strategy: Any = HybridStrategy(pipeline, 1, balance=balance) if world > 1 else "auto"  # type: ignore[arg-type]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        max_steps=3,
        **QUIET,
    )
    # Small images: what is balanced, weights and activations together, is nearly all weights.
    trainer.fit(module, DataLoader(nets.Float32Images(6), 2))
    return module.held[-1]


def test_a_quarter_of_the_network_on_each_of_four_ranks() -> None:
    whole = 16 * sum(parameter.numel() for parameter in VGGLike().parameters())
    held = run_ranks(4, _fit, 4, "memory", timeout=100)
    assert max(held) <= 1.1 * whole / 4, [count / whole for count in held]
    assert sum(held) >= 0.99 * whole  # nothing was left out of the count
