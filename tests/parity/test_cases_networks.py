"""Networks of every shape, as users write them, cut without an edit: the numbers of one process."""

import dataclasses
import itertools
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import BinaryF1Score
from torchvision.models import resnet18

from lightning_cnnpar import HybridStrategy
from tests import nets
from tests.fitting import QUIET, Case, Layout
from tests.parity.stories import Stories, Story
from tests.ranks import run_ranks


def convs(*widths: int, size: int = 3) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Conv2d(inputs, outputs, size, padding=size // 2), nn.ReLU()]
    return nn.Sequential(*layers)


class Segmentation(pl.LightningModule):
    """A U-Net that finds bright regions, judged by Dice (the F1 score of pixels)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nets.UNet()
        self.dice = BinaryF1Score()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def _shared(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        images, _ = batch
        masks = (images.mean(dim=1) > 0.3).long()
        logits = self(images)
        return logits, masks, F.cross_entropy(logits, masks)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._shared(batch)[2]
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits, masks, _ = self._shared(batch)
        self.dice(logits.argmax(dim=1), masks)
        self.log("dice", self.dice)

    def configure_optimizers(self) -> Any:
        return nets.adamw(self.parameters())


class Twice(nn.Module):
    """One convolution used twice in a row, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = convs(3, 8), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(self.body(F.relu(self.body(x))))
        return self.head(x.mean(dim=(2, 3)))


class Pyramid(nn.Module):
    """One head, shared by three levels of a backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.level1, self.level2, self.level3 = convs(3, 8, 8), convs(8, 8, 8), convs(8, 8, 8)
        self.tower = convs(8, 8)
        self.score = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        a = self.level1(x)
        b = self.level2(F.max_pool2d(a, 2))
        c = self.level3(F.max_pool2d(b, 2))
        return [self.score(self.tower(level)) for level in (a, b, c)]


def pyramid_loss(outputs: Any, labels: Tensor) -> Tensor:
    assert isinstance(outputs, list)
    return torch.stack([F.cross_entropy(level.mean(dim=(2, 3)), labels) for level in outputs]).sum()


class SharedAlong(nn.Module):
    """One convolution between all levels: it can't be on one stage if the levels are on several."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList([convs(3, 8, 8), convs(8, 8, 8), convs(8, 8, 8), convs(8, 8, 8)])
        self.shared = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for level in self.levels:
            x = F.relu(self.shared(level(x)))
        return self.head(x.mean(dim=(2, 3)))


class Tied(nets.Classifier):
    """Notes whether this rank is one of several that hold the shared convolution."""

    def __init__(self) -> None:
        super().__init__(SharedAlong(), nets.adamw)
        self.extra = False

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, HybridStrategy):
            stages = [stage.modules for stage in strategy.plan.stages]
            self.extra = sum("shared" in modules for modules in stages) == strategy.mesh.pipeline_size


class WithAuxiliary(nn.Module):
    """A segmentation network's dictionary of outputs; "aux" is made early."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.middle, self.late = convs(3, 8), convs(8, 8, 8), convs(8, 8, 8)
        self.aux_head, self.head = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        early = self.early(x)
        result = {"out": self.head(self.late(self.middle(early)))}
        if self.training:
            result["aux"] = self.aux_head(early)
        return result


def auxiliary_loss(outputs: Any, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(outputs["out"].mean(dim=(2, 3)), labels)
    return loss + 0.4 * F.cross_entropy(outputs["aux"].mean(dim=(2, 3)), labels) if "aux" in outputs else loss


class TwoHeads(nn.Module):
    """A shared stem and two branches of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = convs(3, 8, 8), convs(8, 8, 8), convs(8, 8)
        self.classes, self.offset = nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        return self.classes(self.left(x).mean(dim=(2, 3))), self.offset(self.right(x).mean(dim=(2, 3)))


def two_losses(outputs: Any, labels: Tensor) -> Tensor:
    classes, offset = outputs
    return F.cross_entropy(classes, labels) + 0.3 * F.mse_loss(offset[:, 0], labels.to(offset.dtype))


class Conditioned(nn.Module):
    """Takes an image and, in whichever way, something beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = convs(3, 8, 8), convs(8, 8, 8), nn.Linear(8, 4)

    def forward(self, x: Any, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        if isinstance(x, dict):
            x, mask = x["image"], x["mask"]
        elif isinstance(x, list):
            x = x[0] + 0.5 * x[1]
        x = self.first(x)
        if mask is not None:
            x = x * mask
        return self.head(self.second(x * scale).mean(dim=(2, 3)))


class Conditions(nets.Classifier):
    """Calls its network with extra, keyword, list and dictionary inputs, all in one step."""

    def __init__(self) -> None:
        super().__init__(Conditioned())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        mask = (images.mean(dim=1, keepdim=True) > 0).to(images.dtype)
        calls = [
            self.model(images, mask),
            self.model(images, mask=mask, scale=0.5 if batch_idx % 2 else 2.0),
            self.model([images, images.flip(3)]),
            self.model({"image": images, "mask": mask}),
        ]
        loss = torch.stack([F.cross_entropy(logits, labels) for logits in calls]).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("val_loss", F.cross_entropy(self.model(images, scale=0.5), labels))


class Pair(NamedTuple):
    logits: Tensor
    features: Tensor


@dataclasses.dataclass
class Prediction:
    pair: Pair
    maps: dict[str, Tensor]
    levels: list[Tensor]
    name: str = "prediction"


class Structured(nn.Module):
    """Returns a dataclass that holds a named tuple, a dictionary, a list and a string."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = convs(3, 8, 8), convs(8, 8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Prediction:
        a = self.first(x)
        b = self.second(a)
        pooled = b.mean(dim=(2, 3))
        return Prediction(Pair(self.head(pooled), pooled), {"early": a}, [a, b])


def structured_loss(outputs: Any, labels: Tensor) -> Tensor:
    assert isinstance(outputs, Prediction)
    assert isinstance(outputs.pair, Pair)
    assert outputs.name == "prediction"
    penalty = outputs.maps["early"].square().mean() + torch.stack([level.mean() for level in outputs.levels]).sum()
    return F.cross_entropy(outputs.pair.logits, labels) + 0.1 * penalty + outputs.pair.features.abs().mean()


class LayersOnModule(nets.Classifier):
    """The layers are attributes of the LightningModule itself."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.conv3, self.fc = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.fc(F.relu(self.conv3(x)).mean(dim=(2, 3)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss


class CalledBothWays(nets.Classifier):
    """`self(x)` in training and `self.model(x)` in validation: the other way round than `Classifier`."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("val_loss", F.cross_entropy(self.model(images), labels))


class EncoderDecoder(pl.LightningModule):
    """Training calls the parts one after the other, validation and prediction call `self(x)`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = convs(3, 8, 8, 8), convs(8, 8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, _ = batch
        code = self.encoder(images)
        loss = F.mse_loss(self.decoder(code), images) + 0.01 * code.abs().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[0]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return nets.sgd(self.parameters())


def predictions(trainer: pl.Trainer, module: pl.LightningModule) -> Tensor:
    found = trainer.predict(module, DataLoader(nets.images12(), 8))
    assert found is not None
    return torch.cat(found)  # type: ignore[arg-type]


class Unused(nets.Classifier):
    """A head that no step calls and a frozen teacher; weight decay must not touch what has no gradient."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2), nets.adamw)
        self.model.classifier = nn.Linear(8, 10)  # type: ignore[assignment]
        self.spare = nn.Linear(3, 3)
        self.teacher = nets.plain().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        with torch.no_grad():
            soft = self.teacher(images).softmax(dim=1)
        logits = self.model(images)
        loss = F.cross_entropy(logits, labels) + F.cross_entropy(logits, soft)
        self.log("train_loss", loss, sync_dist=True)
        return loss


def two_branches() -> pl.LightningModule:
    return nets.Classifier(TwoHeads(), loss=two_losses)


def unet() -> pl.LightningModule:
    return nets.Classifier(nets.UNet())


def residual() -> pl.LightningModule:
    return nets.Classifier(nets.Residual())


def weight_used_twice() -> pl.LightningModule:
    return nets.Classifier(Twice())


def pyramid() -> pl.LightningModule:
    return nets.Classifier(Pyramid(), loss=pyramid_loss)


def auxiliary() -> pl.LightningModule:
    return nets.Classifier(WithAuxiliary(), loss=auxiliary_loss)


def structured() -> pl.LightningModule:
    return nets.Classifier(Structured(), loss=structured_loss)


def both_ways() -> pl.LightningModule:
    return CalledBothWays(nets.Residual(blocks=2))


def images24() -> nets.Images:
    return nets.Images(24)


STORIES = Stories(
    {
        "C03": Story(Case(two_branches, images24)),
        "C04": Story(Case(unet, nets.images40, nets.images12), Layout(3, 1)),
        "C06": Story(Case(Segmentation, images24, nets.images12), Layout(2, 2)),
        "C07": Story(Case(residual, images24, options={"cut_points": ["blocks.1.conv2"]})),
        "C19": Story(Case(weight_used_twice, nets.images40)),
        "C20": Story(Case(pyramid, nets.images40), Layout(3, 1)),
        "C20 on two ranks and replicas": Story(Case(pyramid, images24), Layout(2, 2)),
        "C20 on every rank": Story(Case(Tied, nets.images40, trainer={"gradient_clip_val": 0.05}), Layout(3, 1)),
        "C20 on every rank of replicas": Story(
            Case(Tied, nets.images40, trainer={"accumulate_grad_batches": 2}), Layout(2, 2)
        ),
        "C31": Story(Case(Unused, images24), Layout(1, 2)),
        "C31 over stages": Story(Case(Unused, images24), Layout(2, 2)),
        "C73": Story(Case(auxiliary, images24, nets.images12), Layout(3, 1)),
        "inputs": Story(Case(Conditions, images24, nets.images12)),
        "outputs": Story(Case(structured, images24)),
        "layers": Story(Case(LayersOnModule, images24, nets.images12)),
        "both ways": Story(Case(both_ways, images24, nets.images12)),
        "parts": Story(Case(EncoderDecoder, images24, nets.images12, after=predictions)),
        "parts first": Story(
            Case(EncoderDecoder, images24, nets.images12, after=predictions, trainer={"num_sanity_val_steps": 0})
        ),
    }
)


class Resnet(pl.LightningModule):
    """What a tutorial shows, with torchvision's ResNet-18."""

    def __init__(self) -> None:
        super().__init__()
        self.model = resnet18(num_classes=4)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def resnet_losses(rank: int, world_size: int, *strategy: Any) -> list[float]:
    pl.seed_everything(1, verbose=False)
    module = Resnet()
    trainer = pl.Trainer(
        strategy=strategy[0] if strategy else "auto",
        accelerator="cpu",
        devices=world_size,
        max_epochs=1,
        **QUIET,
        # BatchNorm over the few values of small images amplifies float32's last bits from step to step.
        precision="64-true",
    )
    trainer.fit(module, DataLoader(nets.Images(20, size=32), 4))
    return module.losses


@pytest.mark.case("C01")
@pytest.mark.filterwarnings("ignore")
def test_case_c01_a_resnet_gives_the_losses_of_one_process() -> None:
    expected = resnet_losses(0, 1)
    strategy = HybridStrategy(pipeline_parallel_size=2, num_microbatches=1)
    for losses in run_ranks(2, resnet_losses, strategy):
        assert losses == pytest.approx(expected, abs=1e-5)
    assert len(expected) == 5


@pytest.mark.case("C03")
def test_case_c03_two_heads_returned_as_a_tuple() -> None:
    STORIES.hold("C03")


@pytest.mark.case("C04")
def test_case_c04_an_unmodified_unet_over_three_ranks() -> None:
    STORIES.hold("C04")


@pytest.mark.case("C06")
def test_case_c06_a_unet_over_stages_and_replicas_has_the_dice_of_one_process() -> None:
    _, oracle = STORIES.hold("C06")
    assert "dice" in oracle.metrics


@pytest.mark.case("C07")
def test_case_c07_a_cut_inside_of_a_residual_block() -> None:
    STORIES.hold("C07")


@pytest.mark.case("C19")
def test_case_c19_a_weight_used_twice_is_counted_once() -> None:
    STORIES.hold("C19")


@pytest.mark.case("C20")
@pytest.mark.parametrize("story", ["C20", "C20 on two ranks and replicas"])
def test_case_c20_a_head_shared_by_levels_on_several_ranks(story: str) -> None:
    STORIES.hold(story)


@pytest.mark.case("C20")
@pytest.mark.parametrize("story", ["C20 on every rank", "C20 on every rank of replicas"])
def test_case_c20_a_layer_that_every_rank_holds(story: str) -> None:
    # That all holders have the same weights at the end is part of every comparison.
    record, _ = STORIES.hold(story)
    assert all(record.extra)


@pytest.mark.case("C31")
@pytest.mark.parametrize("story", ["C31", "C31 over stages"])
def test_case_c31_unused_and_frozen_parts_need_no_flag(story: str) -> None:
    _, oracle = STORIES.hold(story)
    assert not any(name.startswith(("spare", "teacher", "model.classifier")) for name in oracle.gradients[0])


@pytest.mark.case("C73")
def test_case_c73_a_dictionary_with_an_early_auxiliary_head() -> None:
    STORIES.hold("C73")


def test_extra_keyword_list_and_dictionary_inputs() -> None:
    STORIES.hold("inputs")


def test_outputs_of_nested_types_of_the_user() -> None:
    STORIES.hold("outputs")


def test_layers_on_the_module_itself() -> None:
    STORIES.hold("layers")


def test_the_network_called_through_the_module_and_directly() -> None:
    STORIES.hold("both ways")


@pytest.mark.parametrize("story", ["parts", "parts first"])
def test_parts_called_in_training_and_the_whole_in_validation_and_prediction(story: str) -> None:
    record, oracle = STORIES.hold(story)
    for predicted in record.after:
        torch.testing.assert_close(predicted, oracle.after, rtol=0, atol=1e-10)
