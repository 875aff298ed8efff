"""Habits of users' code around a network call: what works in one process works here, or says why not."""

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests import nets
from tests.fitting import Case, Layout, fit_on_ranks
from tests.parity.stories import Stories, Story
from tests.ranks import RankError


class Teacher(nets.Classifier):
    """A teacher in `inference_mode`; the student in evaluation, then in training, in the same step."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(norm=True, blocks=2))
        self.teacher = nets.plain().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        with torch.inference_mode():
            soft = self.teacher(images).softmax(dim=1)
        self.model.eval()
        with torch.no_grad():
            before = self.model(images).argmax(dim=1)
        self.model.train()
        logits = self.model(images)
        loss = (
            F.cross_entropy(logits, labels) + F.cross_entropy(logits, soft.clone()) + (before == labels).double().mean()
        )
        self.log("train_loss", loss)
        return loss


class Discarding(nets.Classifier):
    """Calls the network once more than the loss needs, and returns a dictionary."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.model(batch[0] + 1)
        return {"loss": F.cross_entropy(self.model(batch[0]), batch[1]), "batch": batch_idx}


class Recomputing(nn.Module):
    """The user's own activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList([nets.Block(8, False) for _ in range(4)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.head(x.mean(dim=(2, 3)))


class Adversary(nets.Classifier):
    """Trains on images moved along the gradient of the loss (FGSM)."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        images = images.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(self.model(images), labels), images)
        loss = F.cross_entropy(self.model((images + 0.1 * slope.sign()).detach()), labels)
        self.log("train_loss", loss, sync_dist=True)
        return loss


class Penalty(nets.Classifier):
    """A gradient penalty: gradients of gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        images = images.clone().requires_grad_()
        loss = F.cross_entropy(self.model(images), labels)
        (slope,) = torch.autograd.grad(loss, images, create_graph=True)
        return loss + slope.square().sum()


class Turns(nets.Classifier):
    """Uses one of two outputs in each step, so one head has no gradient; and writes into an output."""

    def __init__(self) -> None:
        super().__init__(nets.TwoBranch(), nets.adamw)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        coarse, fine = self.model(images)
        if batch_idx % 2:
            return coarse.square().mean()
        fine[:, 0] += 1.0
        fine.mul_(0.5)
        return F.cross_entropy(fine, labels)


class Apart(nets.Classifier):
    """A backward pass that meets no network, beside one that does."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2))
        self.automatic_optimization = False
        self.temperature = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward((self.temperature - images.mean()).square())
        self.manual_backward(F.cross_entropy(self.model(images), labels) * self.temperature)
        optimizer.step()


def _convs(wrap: Any) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs in (3, 8, 8, 8):
        layers += [wrap(nn.Conv2d(inputs, 8, 3, padding=1)), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), wrap(nn.Linear(8, 4)))


def weight_norms() -> nets.Classifier:
    return nets.Classifier(_convs(parametrizations.weight_norm))


def spectral_norms() -> nets.Classifier:
    return nets.Classifier(_convs(parametrizations.spectral_norm))


def old_spectral_norms() -> nets.Classifier:
    return nets.Classifier(_convs(nn.utils.spectral_norm))


def recomputing() -> nets.Classifier:
    return nets.Classifier(Recomputing())


class Norms(nets.Classifier):
    """Lightning's recipe to log gradient norms."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.model, norm_type=2))


class ScaledForward(nets.Classifier):
    """Validation cuts a network with the temperature in it; the training step reads the temperature itself."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2))
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) * self.temperature

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]) * self.temperature, batch[1])


def images24() -> nets.Images:
    return nets.Images(24)


ONE: dict[str, Any] = {"options": {"num_microbatches": 1}}
STORIES = Stories(
    {
        "teacher": Story(Case(Teacher, images24, **ONE)),
        "discarding": Story(Case(Discarding, images24), Layout(2, 2)),
        "recomputing": Story(Case(recomputing, images24, nets.images12)),
        "adversary": Story(Case(Adversary, images24), Layout(2, 2)),
        "turns": Story(Case(Turns, nets.images40), Layout(2, 2)),
        "apart": Story(Case(Apart, images24), Layout(2, 2)),
        "weight norm": Story(Case(weight_norms, images24)),
        "spectral norm": Story(Case(spectral_norms, images24, **ONE)),
        "old spectral norm": Story(Case(old_spectral_norms, images24, **ONE)),
    }
)


@pytest.mark.parametrize("story", STORIES.names)
def test_habit(story: str) -> None:
    STORIES.hold(story)


@pytest.mark.parametrize(
    ("module", "message"),
    [(Penalty, "gives first gradients only"), (ScaledForward, r"'temperature' .*HybridStrategy\(network=")],
)
def test_what_cannot_work_says_why(module: Any, message: str) -> None:
    with pytest.raises(RankError, match=message):
        fit_on_ranks(Case(module, images24, nets.images12), Layout(2, 1))


def test_norms_of_own_gradients_only_are_warned_of() -> None:
    record = fit_on_ranks(Case(Norms, images24), Layout(2, 1))
    assert any("grad_norm was called" in text and "of this stage only" in text for text in record.warnings)
