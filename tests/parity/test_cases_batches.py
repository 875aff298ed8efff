"""Batches of every size and kind: cut in microbatches without a sample lost, moved or counted twice."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics import SumMetric

from lightning_cnnpar import HybridStrategy
from tests import nets
from tests.fitting import Case, Layout
from tests.parity.stories import Stories, Story


class Echo(nn.Module):
    """Hands the mean of each image on to the end, beside its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nets.Residual(blocks=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), x.mean(dim=(1, 2, 3))


def hash_of(images: Tensor) -> Tensor:
    return images.mean(dim=(1, 2, 3))


class HashedImages(nets.Images):
    """The label is a hash of the image."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, _ = super().__getitem__(index)
        return image, hash_of(image[None])[0]


def matching_loss(outputs: Any, labels: Tensor) -> Tensor:
    scores, seen = outputs
    if not torch.allclose(seen, labels, rtol=0, atol=1e-12):
        raise ValueError(f"labels of other samples: {labels} for {seen}")
    return F.mse_loss(scores[:, 0], labels)


class Counting(nets.Classifier):
    """Counts samples in validation."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2))
        self.count = SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.count.update(torch.ones(len(batch[1])))
        self.log("count", self.count)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=1)


def evaluated(trainer: pl.Trainer, module: pl.LightningModule) -> tuple[float, Tensor]:
    """Test with batches of 3 of larger images, then predict with batches of 5."""
    (tested,) = trainer.test(module, DataLoader(nets.Images(7, size=12), 3), verbose=False)
    predicted = trainer.predict(module, DataLoader(nets.Images(12), 5))
    assert predicted is not None
    return tested["test_loss"], torch.cat(predicted)  # type: ignore[arg-type]


def other_sizes(replicas: int) -> dict[str, Any]:
    """Validation in batches of 5, of images that are larger than in training."""
    return {
        "train_dataloaders": DataLoader(nets.Images(24), 8 // replicas),
        "val_dataloaders": DataLoader(nets.Images(12, size=10, seed=3), 5),
    }


class Summed(nets.Classifier):
    """A loss that sums over samples. With D replicas, whose gradients are averaged, it is scaled by D."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = 0.01 * F.cross_entropy(self.model(images), labels, reduction="sum")
        strategy = self.trainer.strategy
        replicas = strategy.mesh.data_size if isinstance(strategy, HybridStrategy) else 1
        return loss * replicas


def summed() -> pl.LightningModule:
    return Summed(nets.Residual(blocks=2))


def averaged() -> pl.LightningModule:
    return nets.Classifier(nets.Residual(blocks=2))


def with_norms() -> pl.LightningModule:
    return nets.Classifier(nets.Residual(norm=True, blocks=2))


def hashed() -> pl.LightningModule:
    return nets.Classifier(Echo(), loss=matching_loss)


class Boxes(Dataset[Any]):
    """Images with any number of boxes, as a detector gets them."""

    def __init__(self) -> None:
        self.images = nets.Images(16)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        image, label = self.images[index]
        boxes = torch.linspace(0, 1, 4 * (index % 3), dtype=image.dtype).view(-1, 4)
        return image, {"boxes": boxes, "labels": label.repeat(len(boxes))}


def as_lists(samples: list[tuple[Tensor, dict[str, Tensor]]]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


def box_loaders(replicas: int) -> dict[str, Any]:
    return {"train_dataloaders": DataLoader(Boxes(), 4 // replicas, collate_fn=as_lists)}


class Detector(nn.Module):
    """Takes lists of images and of targets, and returns a dictionary of losses, as torchvision's detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nets.plain()[:-3]
        self.box, self.score = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        features = self.backbone(torch.stack(images)).mean(dim=(2, 3))
        boxes, scores = self.box(features), self.score(features)
        box_loss, score_loss = boxes.sum() * 0, scores.sum() * 0
        for i, target in enumerate(targets):
            count = target["boxes"].shape[0]
            if count:
                box_loss = box_loss + (boxes[i] - target["boxes"]).square().mean()
                score_loss = score_loss + F.cross_entropy(scores[i].expand(count, 4), target["labels"])
        return {"boxes": box_loss, "scores": score_loss}


class Detection(nets.Classifier):
    def __init__(self) -> None:
        super().__init__(Detector())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = self.model(*batch)
        self.log_dict(losses, batch_size=len(batch[0]))
        return losses["boxes"] + losses["scores"]


class Indexed(nets.Images):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:  # type: ignore[override]
        return *super().__getitem__(index), index


class Noting(nets.Classifier):
    """Notes which samples each step sees."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2))
        self.extra: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels, ids = batch
        self.extra.append(ids.tolist())
        return super().training_step((images, labels), batch_idx)


def uneven() -> nn.Sequential:
    """Convolutions weigh most for large images and linear layers for small ones: the best cut depends on the size."""
    linear = [nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)]
    convs = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *linear)


class Resized(nets.Classifier):
    """Another image size in each step, and in each replica."""

    def __init__(self) -> None:
        super().__init__(uneven())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        strategy = self.trainer.strategy
        if not isinstance(strategy, HybridStrategy):
            # One process sees what two replicas see: the first half of a batch goes to the first one.
            halves = zip(images.chunk(2), labels.chunk(2), strict=True)
            losses = [self._loss_at(*half, batch_idx + d) for d, half in enumerate(halves)]
            loss = torch.stack(losses).mean()
        else:
            loss = self._loss_at(images, labels, batch_idx + strategy.mesh.data_rank)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def _loss_at(self, images: Tensor, labels: Tensor, turn: int) -> Tensor:
        size = (2, 20, 12)[turn % 3]
        return F.cross_entropy(self.model(F.interpolate(images, (size, size))), labels)


class Unbatched(nets.Classifier):
    """Calls its network with one sample, without a batch dimension, and with a batch of one."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
        self.images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        flat = images[:, 0].flatten(1)[:, :12]
        maps = self.images(images[0])
        loss = F.cross_entropy(self.model(flat[0]), labels[0]) + F.cross_entropy(self.model(flat[:1]), labels[:1])
        loss = loss + F.cross_entropy(maps.mean(dim=(1, 2)), labels[0])
        self.log("train_loss", loss)
        return loss


def images21() -> nets.Images:
    return nets.Images(21)


def images24() -> nets.Images:
    return nets.Images(24)


def images10() -> nets.Images:
    return nets.Images(10)


def images16() -> nets.Images:
    return nets.Images(16)


def hashed_images() -> nets.Images:
    return HashedImages(21)


def indexed_images() -> nets.Images:
    return Indexed(16)


MEAN, SUM = Case(averaged, images16), Case(summed, images16)
SHORT = Case(Counting, images10, images10, batch=4, options={"num_microbatches": 4})
SINGLES = {"batch": 4, "options": {"num_microbatches": 4}}
STORIES = Stories(
    {
        "C09": Story(Case(averaged, images21, options={"num_microbatches": 3}), Layout(3, 1)),
        "C11": Story(Case(hashed, hashed_images, shuffle=True, trainer={"accumulate_grad_batches": 2})),
        "C12": Story(SHORT),
        "C12 over replicas": Story(SHORT, Layout(2, 2), oracle=SHORT),
        "C13": Story(Case(averaged, images16, **SINGLES)),
        "C13 with BatchNorm": Story(Case(with_norms, images16, **SINGLES)),
        "C14 mean (1, 1)": Story(Case(averaged, images16, options={"num_microbatches": 3}), Layout(1, 1)),
        "C14 mean (2, 1)": Story(MEAN),
        "C14 mean (1, 2)": Story(MEAN, Layout(1, 2)),
        "C14 mean (2, 2)": Story(MEAN, Layout(2, 2)),
        "C14 sum (1, 1)": Story(Case(summed, images16, options={"num_microbatches": 3}), Layout(1, 1)),
        "C14 sum (2, 1)": Story(SUM),
        "C14 sum (1, 2)": Story(SUM, Layout(1, 2)),
        "C14 sum (2, 2)": Story(SUM, Layout(2, 2)),
        "C16": Story(Case(Counting, images16, loaders=other_sizes, after=evaluated)),
        "C17": Story(Case(Detection, Boxes, loaders=box_loaders, options={"num_microbatches": 2})),
        "C46": Story(Case(Noting, indexed_images, shuffle=True, trainer={"max_epochs": 2}), Layout(2, 2)),
        "C60": Story(Case(Resized, images24, batch=8), Layout(2, 2)),
        "unbatched": Story(Case(Unbatched, images16)),
        "of one": Story(Case(averaged, images10, batch=1)),
    }
)


@pytest.mark.case("C09")
def test_case_c09_a_batch_that_does_not_divide_by_the_microbatches() -> None:
    STORIES.hold("C09")


@pytest.mark.case("C11")
def test_case_c11_labels_belong_to_the_samples_of_the_outputs() -> None:
    STORIES.hold("C11")


@pytest.mark.case("C12")
def test_case_c12_a_short_last_batch_in_training_and_validation() -> None:
    record, _ = STORIES.hold("C12")
    assert len(record.gradients) == 3
    assert record.metrics["count"] == 10


@pytest.mark.case("C12")
def test_case_c12_each_sample_counts_once_over_replicas() -> None:
    assert STORIES.record("C12 over replicas").metrics["count"] == 10


@pytest.mark.case("C13")
def test_case_c13_microbatches_of_one_sample() -> None:
    STORIES.hold("C13")


@pytest.mark.case("C13")
def test_case_c13_batch_norm_gets_more_than_one_sample_and_the_user_advice() -> None:
    record = STORIES.record("C13 with BatchNorm")
    advice = [text for text in record.warnings if "BatchNorm can't take statistics" in text]
    assert len(advice) == 1
    assert "num_microbatches=2" in advice[0]
    assert all(value.isfinite().all() for value in record.state.values())


@pytest.mark.case("C14")
@pytest.mark.parametrize("layout", ["(1, 1)", "(2, 1)", "(1, 2)", "(2, 2)"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_case_c14_gradients_have_the_scale_of_the_whole_batch(reduction: str, layout: str) -> None:
    STORIES.hold(f"C14 {reduction} {layout}")


@pytest.mark.case("C16")
def test_case_c16_evaluation_with_other_batch_and_image_sizes() -> None:
    record, oracle = STORIES.hold("C16")
    for tested, predicted in record.after:
        assert tested == pytest.approx(oracle.after[0], abs=1e-6)
        assert torch.equal(predicted, oracle.after[1])


@pytest.mark.case("C17")
def test_case_c17_lists_of_images_and_targets_run_whole_and_say_so() -> None:
    record, _ = STORIES.hold("C17")
    assert any("runs each batch whole" in text for text in record.warnings)


@pytest.mark.case("C46")
def test_case_c46_ranks_of_a_replica_see_the_same_samples_and_replicas_different_ones() -> None:
    record, oracle = STORIES.hold("C46")
    first, also_first, second, also_second = record.extra
    assert first == also_first
    assert second == also_second
    for one, other, whole in zip(first, second, oracle.extra, strict=True):
        assert one + other == whole


@pytest.mark.case("C60")
def test_case_c60_image_sizes_change_with_step_and_replica() -> None:
    STORIES.hold("C60")


def test_inputs_without_a_batch_dimension() -> None:
    STORIES.hold("unbatched")


def test_a_batch_of_one() -> None:
    record, _ = STORIES.hold("of one")
    assert not any("runs each batch whole" in text for text in record.warnings)
