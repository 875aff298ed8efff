"""Training steps of every kind: several networks and calls, several optimizers, losses that look across the batch."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cnnpar import HybridStrategy
from tests import nets
from tests.fitting import Case, Layout
from tests.parity.stories import Stories, Story


def encoder(norm: bool = False) -> nn.Module:
    return nets.Residual(norm, blocks=2, classes=6)


class Stem(nets.Classifier):
    """Trainable parts outside of the network: a stem before it and a temperature behind it.

    Validation calls `self(x)`, which has the stem in it, and before the first training step.
    """

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2, channels=5), nets.adamw)
        self.stem = nn.Conv2d(3, 5, 1)
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(F.relu(self.stem(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        self.steps += 1
        logits = self.model(F.relu(self.stem(images))) * self.temperature
        loss = F.cross_entropy(logits, labels)
        self.log("train_loss", loss, sync_dist=True)
        return loss


class ScaledForward(Stem):
    """The temperature is read in the step and in `forward`."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature


class Mixup(nets.Classifier):
    """Mixes samples and flips images with numbers from three generators, drawn in the step."""

    def __init__(self, network: nn.Module | None = None) -> None:
        super().__init__(network or nets.Residual(blocks=2))
        self.extra: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        images = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images, images.flip(3))
        share, order = float(np.random.beta(0.4, 0.4)), torch.randperm(len(images))
        self.extra.append(order.tolist())
        logits = self.model(share * images + (1 - share) * images[order])
        loss = share * F.cross_entropy(logits, labels) + (1 - share) * F.cross_entropy(logits, labels[order])
        self.log("train_loss", loss)
        return loss


def mixup_and_dropout() -> pl.LightningModule:
    """The masks of early and late stages take different amounts of randomness."""
    early, late = nets.plain()[:4], nets.plain()[4:]
    return Mixup(nn.Sequential(*early, nn.Dropout(0.5), *late))


class Contrastive(nets.Classifier):
    """Every sample is compared with every other one, in two views, by two calls."""

    def __init__(self) -> None:
        super().__init__(encoder())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, _ = batch
        views = [F.normalize(self.model(view)) for view in (images, images.flip(3) + 0.1 * torch.randn_like(images))]
        loss = F.cross_entropy(views[0] @ views[1].T / 0.2, torch.arange(len(images)))
        self.log("train_loss", loss)
        return loss


class Triplet(nets.Classifier):
    """Three calls of one network, of which one result is used twice and one without a gradient."""

    def __init__(self) -> None:
        super().__init__(encoder())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, _ = batch
        anchor, positive = self.model(images), self.model(images + 0.1)
        with torch.no_grad():
            negative = self.model(images.roll(1, 0))
        loss = F.triplet_margin_loss(anchor, positive, negative) + anchor.square().mean()
        self.log("train_loss", loss)
        return loss


class Bootstrap(nets.Classifier):
    """A target network, called without gradients, that follows the online one by an average in the step."""

    def __init__(self) -> None:
        super().__init__(encoder())
        self.target = encoder().requires_grad_(False)
        self.target.load_state_dict(self.model.state_dict())
        self.predictor = nn.Linear(6, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, _ = batch
        with torch.no_grad():
            wanted = self.target(images.flip(3))
        loss = F.mse_loss(self.predictor(self.model(images)), wanted)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.model.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)


class Pairs(nets.Classifier):
    """A Siamese network, of which the second call is compared with the first."""

    def __init__(self) -> None:
        super().__init__(encoder())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        one, other = self.model(images), self.model(images.flip(0))
        same = (labels == labels.flip(0)).to(images.dtype)
        distance = F.pairwise_distance(one, other)
        loss = (same * distance + (1 - same) * F.relu(1 - distance)).mean()
        self.log("train_loss", loss)
        return loss


class Manual(nets.Classifier):
    """Optimises by hand: gradients of two losses, one graph kept, clipped, and a scheduler stepped."""

    def __init__(self) -> None:
        super().__init__(nets.TwoBranch())
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        optimizer = self.optimizers()
        coarse, fine = self.model(images)
        optimizer.zero_grad()
        self.manual_backward(0.1 * coarse.square().mean(), retain_graph=True)
        loss = F.cross_entropy(fine, labels)
        self.manual_backward(loss + 0.1 * coarse.abs().mean())
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        else:
            self.clip_own(0.04)
        optimizer.step()
        self.lr_schedulers().step()
        self.log("train_loss", loss, sync_dist=True)

    def clip_own(self, limit: float) -> None:
        strategy = self.trainer.strategy
        clip = strategy.clip_grad_norm_ if isinstance(strategy, HybridStrategy) else nn.utils.clip_grad_norm_
        self.log("norm", clip(self.parameters(), limit))

    def configure_optimizers(self) -> Any:
        optimizer = nets.sgd(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


class Accumulating(nets.Classifier):
    """Optimises by hand after every second batch."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.cross_entropy(self.model(batch[0]), batch[1]) / 2
        self.manual_backward(loss)
        if batch_idx % 2:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


class Adversarial(pl.LightningModule):
    """A generator and a discriminator, trained in turns by two optimizers; latents come with the batch."""

    norm = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        norm: type[nn.Module] = nn.BatchNorm2d if self.norm else nn.Identity
        self.generator = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), norm(8), nn.ReLU(),
            nn.Conv2d(8, 3, 3, padding=1), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.LeakyReLU(0.2), nn.Conv2d(8, 8, 3, padding=1), norm(8),
            nn.LeakyReLU(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1),
        )  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images, _ = batch
        latents = images.flip(1) * 0.5
        for_generator, for_discriminator = self.optimizers()

        self.toggle_optimizer(for_generator)
        g_loss = F.softplus(-self.discriminator(self.generator(latents))).mean()
        for_generator.zero_grad()
        self.manual_backward(g_loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)

        self.toggle_optimizer(for_discriminator)
        real, fake = self.discriminator(images), self.discriminator(self.generator(latents).detach())
        d_loss = F.softplus(-real).mean() + F.softplus(fake).mean()
        for_discriminator.zero_grad()
        self.manual_backward(d_loss)
        for_discriminator.step()
        self.untoggle_optimizer(for_discriminator)
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (self.generator, self.discriminator)]


class AdversarialWithNorms(Adversarial):
    norm = True


class Alternating(Adversarial):
    """Turns by `requires_grad_` and by batch, without toggling."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images, _ = batch
        turn = batch_idx % 2
        self.generator.requires_grad_(not turn)
        self.discriminator.requires_grad_(bool(turn))
        optimizer = self.optimizers()[turn]
        fake = self.discriminator(self.generator(images.flip(1)))
        loss = (
            F.softplus(fake).mean() + F.softplus(-self.discriminator(images)).mean()
            if turn
            else F.softplus(-fake).mean()
        )
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss, sync_dist=True)


def frozen_last() -> pl.LightningModule:
    """The last stage is frozen, gradients flow through it."""
    network = nets.Residual()
    network.head.requires_grad_(False)
    network.blocks[2:].requires_grad_(False)
    return nets.Classifier(network)


def frozen_first() -> pl.LightningModule:
    return nets.Classifier(nets.frozen_backbone())


class AllFrozen(Stem):
    """Only the temperature behind the network trains."""

    def __init__(self) -> None:
        super().__init__()
        self.model.requires_grad_(False)
        self.stem.requires_grad_(False)


class AllFrozenButStem(Stem):
    """Only the stem in front of the frozen network trains, and only through it."""

    def __init__(self) -> None:
        super().__init__()
        self.model.requires_grad_(False)
        self.temperature.requires_grad_(False)


def residual() -> pl.LightningModule:
    return nets.Classifier(nets.Residual())


def images24() -> nets.Images:
    return nets.Images(24)


SYNCED = {"trainer": {"sync_batchnorm": True}, "options": {"num_microbatches": 1}}
STORIES = Stories(
    {
        "stem": Story(Case(Stem, images24, nets.images12)),
        "stem first": Story(Case(Stem, images24, nets.images12, trainer={"num_sanity_val_steps": 0, "max_epochs": 2})),
        "stem named": Story(Case(ScaledForward, images24, nets.images12, options={"network": "model"})),
        "stem over replicas": Story(Case(Stem, images24, nets.images12), Layout(2, 2)),
        "mixup": Story(Case(Mixup, images24, shuffle=True)),
        "mixup and dropout": Story(Case(mixup_and_dropout, nets.images40)),
        "contrastive": Story(Case(Contrastive, images24, shuffle=True)),
        "triplet": Story(Case(Triplet, images24)),
        "bootstrap": Story(Case(Bootstrap, images24)),
        "pairs": Story(Case(Pairs, images24)),
        "manual": Story(Case(Manual, images24)),
        "manual over replicas": Story(Case(Manual, images24), Layout(2, 2)),
        "accumulating": Story(Case(Accumulating, images24), Layout(2, 2)),
        "C29": Story(Case(AdversarialWithNorms, images24, **SYNCED), Layout(1, 2)),
        "C29 over stages": Story(Case(AdversarialWithNorms, images24, **SYNCED), Layout(2, 2)),
        "C35 over stages": Story(Case(Adversarial, images24)),
        "C35 over replicas": Story(Case(Adversarial, images24), Layout(1, 2)),
        "C35 over both": Story(Case(Adversarial, images24), Layout(2, 2)),
        "alternating": Story(Case(Alternating, nets.images40), Layout(2, 2)),
        "frozen last": Story(Case(frozen_last, images24)),
        "frozen first": Story(Case(frozen_first, images24)),
        "all frozen": Story(Case(AllFrozen, images24)),
        "all frozen but the stem": Story(Case(AllFrozenButStem, images24), Layout(2, 2)),
        "accumulation": Story(Case(residual, nets.images40, trainer={"accumulate_grad_batches": 3}), Layout(2, 2)),
    }
)


@pytest.mark.parametrize("story", ["stem", "stem first", "stem named", "stem over replicas"])
def test_trainable_parts_outside_of_the_network(story: str) -> None:
    STORIES.hold(story)


def test_mixup_and_augmentation_draw_the_same_on_every_rank() -> None:
    record, oracle = STORIES.hold("mixup")
    assert record.extra == [oracle.extra, oracle.extra]


def test_dropout_in_a_stage_leaves_the_randomness_of_the_step_alone() -> None:
    first, second = STORIES.record("mixup and dropout").extra
    assert first == second
    assert len({tuple(order) for order in first}) == 5


def test_a_loss_that_compares_all_samples() -> None:
    STORIES.hold("contrastive")


def test_three_network_calls_of_which_one_has_no_gradient() -> None:
    STORIES.hold("triplet")


def test_a_target_network_that_follows_by_an_average() -> None:
    STORIES.hold("bootstrap")


def test_a_siamese_network() -> None:
    STORIES.hold("pairs")


@pytest.mark.parametrize("story", ["manual", "manual over replicas"])
def test_manual_optimisation_with_a_kept_graph_and_clipping(story: str) -> None:
    STORIES.hold(story)


def test_manual_accumulation() -> None:
    STORIES.hold("accumulating")


@pytest.mark.case("C29")
@pytest.mark.parametrize("story", ["C29", "C29 over stages"])
def test_case_c29_a_discriminator_with_batch_norm_is_called_twice(story: str) -> None:
    STORIES.hold(story)


@pytest.mark.case("C35")
@pytest.mark.parametrize("layout", ["stages", "replicas", "both"])
def test_case_c35_two_optimizers_by_hand(layout: str) -> None:
    STORIES.hold(f"C35 over {layout}")


def test_alternating_by_freezing() -> None:
    STORIES.hold("alternating")


@pytest.mark.parametrize("story", ["frozen first", "frozen last", "all frozen", "all frozen but the stem"])
def test_frozen_stages(story: str) -> None:
    STORIES.hold(story)


def test_accumulation_with_a_rest() -> None:
    STORIES.hold("accumulation")
