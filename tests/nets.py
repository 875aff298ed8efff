"""Small networks of every shape that users bring, and the modules around them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset


def plain(norm: bool = False) -> nn.Sequential:
    """A chain of convolutions without skips."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (8, 8, 12, 12, 16):
        layers += [nn.Conv2d(channels, width, 3, padding=1)]
        layers += [nn.BatchNorm2d(width)] if norm else []
        layers += [nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 4))


class Block(nn.Module):
    """Two convolutions and the value that skips them."""

    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(width) if norm else nn.Identity()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(width) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + x)


class Residual(nn.Module):
    """A stem, residual blocks and a head."""

    def __init__(self, norm: bool = False, blocks: int = 4, classes: int = 4, channels: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(8, norm) for _ in range(blocks)))
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.stem(x)))
        return self.head(x.mean(dim=(2, 3)))


def _double_conv(inputs: int, outputs: int, norm: bool) -> nn.Sequential:
    def conv(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1), *([nn.BatchNorm2d(b)] if norm else []), nn.ReLU(inplace=True)]

    return nn.Sequential(*conv(inputs, outputs), *conv(outputs, outputs))


class UNet(nn.Module):
    """Three levels, ordinary `torch.cat` skips."""

    def __init__(self, norm: bool = False, width: int = 4, classes: int = 2) -> None:
        super().__init__()
        self.down1 = _double_conv(3, width, norm)
        self.down2 = _double_conv(width, 2 * width, norm)
        self.bottom = _double_conv(2 * width, 4 * width, norm)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.dec2 = _double_conv(4 * width, 2 * width, norm)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.dec1 = _double_conv(2 * width, width, norm)
        self.out = nn.Conv2d(width, classes, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.bottom(self.pool(b))
        b = self.dec2(torch.cat([self.up2(c), b], dim=1))
        a = self.dec1(torch.cat([self.up1(b), a], dim=1))
        return self.out(a)


class TwoBranch(nn.Module):
    """A shared stem and two heads of different depth, returned as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.coarse = nn.Conv2d(8, 2, 1)
        self.deep = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.fine = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        return self.coarse(x), self.fine(self.deep(x).mean(dim=(2, 3)))


class Outputs(NamedTuple):
    """Output of a network with names."""

    logits: Tensor
    features: Tensor


class Images(Dataset[Any]):
    """Seeded random images of a class each, with a signal that can be learned."""

    def __init__(self, count: int, size: int = 8, classes: int = 4, channels: int = 3, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(classes, (count,), generator=generator)
        noise = torch.randn(count, channels, size, size, generator=generator, dtype=torch.float64)
        self.images = noise + self.labels.view(-1, 1, 1, 1) * 0.5

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


class Float32Images(Images):
    """The same in float32."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = super().__getitem__(index)
        return image.float(), label


class Classifier(pl.LightningModule):
    """The module of a tutorial: one network, cross entropy, accuracy, SGD."""

    def __init__(
        self,
        network: nn.Module | None = None,
        optimizer: Callable[..., Any] | None = None,
        loss: Callable[[Any, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.model = network if network is not None else plain()
        self._optimizer = optimizer or sgd
        self._loss = loss or first_cross_entropy

    def forward(self, x: Tensor) -> Any:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = self._loss(self.model(images), labels)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        outputs = self(images)
        self.log("val_loss", self._loss(outputs, labels), sync_dist=True, batch_size=len(labels))

    def configure_optimizers(self) -> Any:
        return self._optimizer(self.parameters())


def first_cross_entropy(outputs: Any, labels: Tensor) -> Tensor:
    """Cross entropy of whichever output has a row a sample."""
    if isinstance(outputs, tuple):
        coarse, fine = outputs
        return F.cross_entropy(fine, labels) + 0.1 * coarse.square().mean()
    if outputs.dim() == 4:
        outputs = outputs.mean(dim=(2, 3))
        labels = labels % outputs.shape[1]
    return F.cross_entropy(outputs, labels)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=1e-2)


def frozen_backbone() -> Residual:
    """A residual network of which only the last block and the head train."""
    network = Residual()
    network.stem.requires_grad_(False)
    network.blocks[:-1].requires_grad_(False)
    return network


def images40() -> Dataset[Any]:
    return Images(40)


def images12() -> Dataset[Any]:
    return Images(12, seed=3)


def tensors(*values: Tensor) -> Dataset[Any]:
    return TensorDataset(*values)
