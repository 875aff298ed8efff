"""Optimizers, schedulers and clipping, as `configure_optimizers` and callbacks set them up."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, LearningRateMonitor
from torch import Tensor, nn
from torch.nn import functional as F

from tests import nets
from tests.fitting import Case, Layout
from tests.parity.stories import Stories, Story


class Groups(nets.Classifier):
    """Two groups with their own rates and decay, and a scheduler stepped after every batch."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rates = [group["lr"] for group in self.optimizers().param_groups]
        self.log_dict({f"lr{i}": rate for i, rate in enumerate(rates)})
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        biases = [p for name, p in self.named_parameters() if name.endswith("bias")]
        weights = [p for name, p in self.named_parameters() if not name.endswith("bias")]
        decayed = {"params": weights, "weight_decay": 0.1, "lr": 1e-3}
        optimizer = torch.optim.AdamW([decayed, {"params": biases, "weight_decay": 0.0, "lr": 1e-2}])
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [2e-3, 2e-2], total_steps=6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Plateau(nets.Classifier):
    """Lowers the rate when the validation loss doesn't fall; monitored."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2))

    def on_train_epoch_end(self) -> None:
        self.log("rate", self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = nets.sgd(self.parameters())
        # No loss is better by so much, so the rate falls after every other epoch.
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Variant(nets.Classifier):
    """AdamW in one of torch's implementations."""

    def __init__(self, **variant: bool) -> None:
        super().__init__(nets.Residual(blocks=2))
        self.variant = variant

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1, **self.variant)


class Several(nets.Classifier):
    """Two optimizers over halves that don't follow the stages, stepped by hand."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer, limit in zip(self.optimizers(), (0.02, 0.03), strict=True):
            self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")
            optimizer.step()

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return [nets.sgd(parameters[::2]), nets.adamw(parameters[1::2])]


class OwnClipping(nets.Classifier):
    """Overrides the hook that clips."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2))

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        limit = 0.1 if self.global_step < 2 else 0.01
        self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")


class Finetuned(pl.LightningModule):
    """A backbone that `BackboneFinetuning` unfreezes in the midst of training, with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nets.plain(norm=True)[:-1]
        self.classifier = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.backbone(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


class Unfreezing(nets.Classifier):
    """Freezes and unfreezes by itself; the optimizer has had all parameters from the start."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2), nets.adamw)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for number, block in enumerate(self.model.blocks):  # type: ignore[arg-type]
            block.requires_grad_(batch_idx % 2 == number)


def finetuning() -> list[pl.Callback]:
    return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=_halved, backbone_initial_lr=0.01)]


def _halved(epoch: int) -> float:
    return 0.5


def monitor() -> list[pl.Callback]:
    return [LearningRateMonitor()]


def foreach() -> pl.LightningModule:
    return Variant(foreach=True)


def fused() -> pl.LightningModule:
    return Variant(fused=True)


def residual() -> pl.LightningModule:
    return nets.Classifier(nets.Residual())


def images24() -> nets.Images:
    return nets.Images(24)


CLIPPED = Case(residual, images24, trainer={"gradient_clip_val": 0.1})
FINETUNED = Case(
    Finetuned,
    images24,
    callbacks=finetuning,
    trainer={"max_epochs": 3, "sync_batchnorm": True},
    options={"num_microbatches": 1},
)
STORIES = Stories(
    {
        "C43 P=2": Story(CLIPPED),
        "C43 P=3": Story(CLIPPED, Layout(3, 1)),
        "C43 D=2": Story(CLIPPED, Layout(1, 2)),
        "C43 P=2 D=2": Story(CLIPPED, Layout(2, 2)),
        "own clipping": Story(Case(OwnClipping, images24)),
        "groups": Story(Case(Groups, images24, trainer={"max_epochs": 2})),
        "plateau": Story(Case(Plateau, images24, nets.images12, trainer={"max_epochs": 4}), Layout(2, 2)),
        "foreach": Story(Case(foreach, images24, trainer={"gradient_clip_val": 0.05})),
        "fused": Story(Case(fused, images24, trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"})),
        "several": Story(Case(Several, images24), Layout(2, 2)),
        "finetuning": Story(FINETUNED),
        "finetuning over replicas": Story(FINETUNED, Layout(2, 2)),
        "unfreezing": Story(Case(Unfreezing, nets.images40), Layout(2, 2)),
    }
)


@pytest.mark.case("C43")
@pytest.mark.parametrize("layout", ["P=2", "P=3", "D=2", "P=2 D=2"])
def test_case_c43_the_norm_is_that_of_all_stages(layout: str) -> None:
    _, oracle = STORIES.hold(f"C43 {layout}")
    norms = [torch.cat([grad.flatten() for grad in step.values()]).norm() for step in oracle.gradients]
    assert all(abs(norm - 0.1) < 1e-4 for norm in norms)


def test_clipping_by_an_overridden_hook() -> None:
    STORIES.hold("own clipping")


def test_parameter_groups_and_a_scheduler_of_each_step() -> None:
    _, oracle = STORIES.hold("groups")
    assert len({step["lr0"] for step in oracle.logged}) == 6


def test_a_scheduler_that_monitors_a_metric() -> None:
    _, oracle = STORIES.hold("plateau")
    assert oracle.metrics["rate"] < 0.05


@pytest.mark.parametrize("variant", ["foreach", "fused"])
def test_implementations_of_an_optimizer(variant: str) -> None:
    STORIES.hold(variant)


def test_two_optimizers_that_share_stages() -> None:
    STORIES.hold("several")


@pytest.mark.parametrize("story", ["finetuning", "finetuning over replicas"])
def test_a_backbone_that_is_unfrozen_in_the_midst_of_training(story: str) -> None:
    _, oracle = STORIES.hold(story)
    assert len(oracle.gradients[0]) < len(oracle.gradients[-1])


def test_blocks_that_are_frozen_in_turns() -> None:
    STORIES.hold("unfreezing")
