"""Steps that run once for each microbatch: what users write in them, held against a run that has the same meaning.

Losses that are means over samples give one process's numbers. Where each microbatch counts by itself (random numbers,
losses that look across samples, BatchNorm), the same microbatches on one rank are the oracle.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_cnnpar import HybridPrecision
from tests import nets
from tests.fitting import Case, Layout, Record, assert_same, fit_alone, fit_on_ranks
from tests.parity.test_cases_statistics import Overflowing, OverflowingLast, scaled
from tests.parity.test_cases_steps import Mixup
from tests.ranks import RankError


def case(module: Callable[[], pl.LightningModule], **more: Any) -> Case:
    return Case(module=module, train=nets.images40, val=nets.images12, **more)


def layout(pipeline: int, data: int = 1, schedule: str = "1f1b", microbatches: int = 4, **more: Any) -> Layout:
    return Layout(pipeline, data, {"schedule": schedule, "num_microbatches": microbatches, **more})


# ---- exactly one process ---------------------------------------------------------------------------------------------


class Stem(nets.Classifier):
    """Trainable parts before and behind the network, and one that bypasses it."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2, channels=5), nets.adamw)
        self.stem = nn.Conv2d(3, 5, 1)
        self.bypass = nn.Linear(5, 4)
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        features = F.relu(self.stem(x))
        return self.model(features) * self.temperature + self.bypass(features.mean((2, 3)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        features = F.relu(self.stem(images))
        logits = self.model(features) * self.temperature + self.bypass(features.mean((2, 3)))
        loss = F.cross_entropy(logits, labels)
        self.log("train_loss", loss, sync_dist=True)
        return loss


class Detector(pl.LightningModule):
    """Lists of images and dictionaries; as many boxes as the image happens to have."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nets.Residual(blocks=3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        predictions = self.model(torch.stack(images))
        per_image = [
            F.mse_loss(prediction.expand(len(target["boxes"]), 4), target["boxes"])
            for prediction, target in zip(predictions, targets, strict=True)
        ]
        loss = torch.stack(per_image).mean()
        self.log("loss", loss, batch_size=len(images))
        return loss

    def configure_optimizers(self) -> Any:
        return nets.sgd(self.parameters())


class Boxes(Dataset[Any]):
    def __init__(self) -> None:
        self._images = nets.Images(20)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        image, _ = self._images[index]
        boxes = torch.arange(4.0, dtype=torch.float64).repeat(1 + index % 3, 1) / (index + 1)
        return image, {"boxes": boxes, "labels": torch.zeros(len(boxes))}


def detection_loaders(replicas: int) -> dict[str, Any]:
    return {"train_dataloaders": DataLoader(Boxes(), 4 // replicas, collate_fn=as_lists)}


def as_lists(samples: list[Any]) -> Any:
    return [image for image, _ in samples], [target for _, target in samples]


class Metrics(nets.Classifier):
    """A torchmetrics metric on step and epoch, sums and extremes, and a dictionary as result."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=3))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
        self.extra: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        logits = self.model(images)
        loss = F.cross_entropy(logits, labels)
        self.accuracy(logits, labels)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict({"loss": loss, "mean": logits.mean()})
        self.log("seen", float(len(labels)), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("highest", logits.max(), reduce_fx=torch.max, on_step=True, on_epoch=True)
        return {"loss": loss, "logits": logits, "labels": labels, "note": "x"}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert torch.equal(outputs["labels"], batch[1])
        self.extra.append((float(outputs["loss"]), outputs["logits"].detach().clone()))


class TwoOutputs(nets.Classifier):
    """A named tuple with an output that an early stage makes."""

    def __init__(self) -> None:
        super().__init__(nets.TwoBranch())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        coarse, _ = self(batch[0])
        self.log("val_coarse", coarse.mean(), batch_size=len(batch[0]))


EXACT = {
    "stem": (case(Stem, batch=8), layout(2, network="model")),
    "stem, three stages and replicas": (case(Stem, batch=8), layout(3, 1, "zero_bubble", 3, network="model")),
    "stem, replicas": (
        case(Stem, batch=8, trainer={"gradient_clip_val": 0.1}),
        layout(2, 2, "1f1b", 2, network="model"),
    ),
    "detector": (
        Case(module=Detector, train=Boxes, batch=4, loaders=detection_loaders),
        layout(2, 1, "1f1b", 2),
    ),
    "metrics": (case(Metrics, batch=8), layout(2, 1, "1f1b", 3)),
    "two outputs": (case(TwoOutputs, batch=8), layout(3, 1, "1f1b", 4)),
    "one rank": (case(Stem, batch=8), layout(1, 1, "1f1b", 3)),
    "replicas only": (case(Metrics, batch=8), layout(1, 2, "1f1b", 2)),
}


@pytest.mark.parametrize("name", EXACT)
def test_means_over_samples_are_those_of_one_process(name: str) -> None:
    trained, where = EXACT[name]
    record, oracle = fit_on_ranks(trained, where), fit_alone(trained)
    if name == "replicas only":
        # Logged without sync_dist: each replica its own samples.
        record.logged, record.metrics = oracle.logged, oracle.metrics
    assert_same(record, oracle)
    if name == "metrics":
        for mine, alone in zip(record.extra[0], oracle.extra, strict=True):
            assert mine[0] == pytest.approx(alone[0], abs=1e-10)
            assert torch.allclose(mine[1], alone[1], rtol=0, atol=1e-10)


# ---- the same microbatches on one rank -------------------------------------------------------------------------------


class Contrastive(nets.Classifier):
    """Two calls of one network; every sample of a microbatch is compared with every other one."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2, classes=6))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, _ = batch
        one = F.normalize(self.model(images), dim=1)
        other = F.normalize(self.model(images + 0.1 * torch.randn_like(images)), dim=1)
        loss = F.cross_entropy(one @ other.T / 0.5, torch.arange(len(images)))
        self.log("train_loss", loss)
        return loss


class Distilled(nets.Classifier):
    """A teacher without gradients is called first."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2))
        self.teacher = nets.Residual(blocks=3).requires_grad_(False).eval()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        with torch.no_grad():
            wanted = self.teacher(images).softmax(1)
        logits = self.model(images)
        loss = F.cross_entropy(logits, labels) + F.cross_entropy(logits, wanted)
        self.log("train_loss", loss)
        return loss


class Chained(nets.Classifier):
    """A second network reads the first one's output, both train."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2))
        self.second = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.model(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self.second(self.model(images))
        loss = F.cross_entropy(logits, labels)
        self.log("train_loss", loss)
        return loss


class Nothing(nets.Classifier):
    """The step doesn't call the network: a regulariser alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, _ = batch
        loss = (self.scale * images).square().mean()
        self.log("train_loss", loss)
        return loss

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2))
        self.scale = nn.Parameter(torch.ones(3, 1, 1))


OWN = {
    "mixup": (case(Mixup, batch=8), layout(2, 1, "1f1b", 4)),
    "mixup, zero bubble": (case(Mixup, batch=8), layout(3, 1, "zero_bubble", 3)),
    "contrastive": (case(Contrastive, batch=8), layout(2, 1, "1f1b", 2)),
    "contrastive, three ranks": (case(Contrastive, batch=8), layout(3, 1, "1f1b", 4)),
    "distilled": (case(Distilled, batch=8), layout(2, 1, "1f1b", 4)),
    "chained": (case(Chained, batch=8), layout(2, 1, "zero_bubble", 4)),
    "chained, replicas": (case(Chained, batch=8), layout(2, 2, "1f1b", 2)),
    "nothing": (case(Nothing, batch=8), layout(2, 1, "1f1b", 2)),
}


@pytest.mark.parametrize("name", OWN)
def test_microbatches_are_those_of_one_rank(name: str) -> None:
    trained, where = OWN[name]
    alone = Layout(1, where.data, where.options | {"schedule": "1f1b"})
    record, oracle = fit_on_ranks(trained, where), fit_on_ranks(trained, alone)
    assert_same(record, oracle)
    if record.extra[0] is not None:
        assert record.extra[0] == oracle.extra[0]


def test_random_numbers_differ_between_microbatches_and_replicas() -> None:
    record = fit_on_ranks(case(Drawing, batch=8), layout(2, 2, "1f1b", 2))
    by_rank = record.extra
    assert by_rank[0] == by_rank[1]
    assert by_rank[2] == by_rank[3]
    drawn = list(itertools.chain(*by_rank[0], *by_rank[2]))
    assert len(set(drawn)) == len(drawn)


class Drawing(nets.Classifier):
    """Notes what it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        before = [float(torch.rand(())), float(np.random.rand())]
        loss: Tensor = super().training_step(batch, batch_idx)
        self.extra.append([*before, float(torch.rand(())), float(np.random.rand())])
        return loss


# ---- BatchNorm, dropout, recomputation -------------------------------------------------------------------------------


def normed() -> pl.LightningModule:
    return nets.Classifier(nets.UNet(norm=True))


def dropped() -> pl.LightningModule:
    layers = nets.plain(norm=True)
    return nets.Classifier(nn.Sequential(*layers[:5], nn.Dropout2d(0.3), *layers[5:9], nn.Dropout(0.5), *layers[9:]))


@functools.cache
def batch_normed(pipeline: int, microbatches: int) -> Record:
    return fit_on_ranks(case(normed, batch=8), layout(pipeline, 1, "gpipe", microbatches))


@pytest.mark.parametrize(
    ("schedule", "pipeline", "microbatches", "more"),
    [
        ("1f1b", 2, 3, {}),
        ("1f1b", 3, 4, {"activation_checkpointing": "always"}),
        ("interleaved_1f1b", 2, 4, {"stages_per_rank": 2}),
        ("zero_bubble", 2, 4, {}),
        ("zero_bubble", 2, 3, {"activation_checkpointing": "except_last"}),
        ("gpipe", 2, 4, {"activation_checkpointing": "always"}),
    ],
)
def test_batch_norm_is_the_same_under_every_schedule(
    schedule: str, pipeline: int, microbatches: int, more: dict[str, Any]
) -> None:
    record = fit_on_ranks(case(normed, batch=8), layout(pipeline, 1, schedule, microbatches, **more))
    assert_same(record, batch_normed(2, microbatches))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("checkpointing", ["always", "except_last"])
def test_recomputation_draws_the_same_masks(schedule: str, checkpointing: str) -> None:
    plain = fit_on_ranks(case(dropped, batch=8), layout(2, 1, "gpipe", 4))
    record = fit_on_ranks(case(dropped, batch=8), layout(2, 1, schedule, 4, activation_checkpointing=checkpointing))
    assert_same(record, plain)
    buffers = [name for name in plain.state if "running" in name or "tracked" in name]
    assert buffers
    if schedule == "gpipe":
        assert all(torch.equal(record.state[name], plain.state[name]) for name in buffers)


# ---- loss scaling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [Overflowing, OverflowingLast])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_an_overflow_on_one_stage_is_skipped_by_all(module: Any, schedule: str) -> None:
    alone = fit_alone(scaled(module, MixedPrecision, device="cpu"))
    record = fit_on_ranks(scaled(module, HybridPrecision, channels_last=None), layout(2, 2, schedule, 2))
    assert len(set(alone.extra)) == 2
    assert all(scales == alone.extra for scales in record.extra)
    for name, value in alone.state.items():
        assert (record.state[name] - value).abs().max() < 1e-3, name


# ---- side effects ----------------------------------------------------------------------------------------------------


class Counting(nets.Classifier):
    """Counts what runs."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=3))
        self.extra = {"before": 0, "after": 0, "logged": 0, "backward": 0, "on_before": 0, "zero": 0}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.extra["before"] += 1
        logits = self.model(batch[0])
        self.extra["after"] += 1
        loss = F.cross_entropy(logits, batch[1])
        self.log("train_loss", loss)
        return loss

    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        self.extra["backward"] += 1
        loss.backward()

    def on_before_backward(self, loss: Tensor) -> None:
        self.extra["on_before"] += 1

    def on_after_backward(self) -> None:
        self.extra["logged"] += int(any(p.grad is not None for p in self.parameters()))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.extra["zero"] += 1


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("pipeline", [1, 2, 3])
def test_every_part_of_a_step_runs_once_for_a_microbatch(schedule: str, pipeline: int) -> None:
    record = fit_on_ranks(case(Counting, batch=8), layout(pipeline, 1, schedule, 4))
    once = {"before": 20, "after": 20, "logged": 5, "backward": 20, "on_before": 5, "zero": 5}
    assert record.extra == [once] * pipeline


class Unusual(nets.Classifier):
    """A batch of a type that nobody knows."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step([batch.images, batch.labels], batch_idx)
        return loss


class Hooked(Unusual):
    """... and how to cut it."""

    def split_microbatches(self, batch: Any, num_microbatches: int) -> list[Any]:
        pairs = zip(batch.images.chunk(num_microbatches), batch.labels.chunk(num_microbatches), strict=True)
        return [Strange(images, labels) for images, labels in pairs]


class Strange:
    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)


def strange(samples: list[Any]) -> Strange:
    return Strange(torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples]))


def strange_loaders(replicas: int) -> dict[str, Any]:
    return {"train_dataloaders": DataLoader(nets.images40(), 8 // replicas, collate_fn=strange)}


@pytest.mark.parametrize(("module", "warned"), [(Unusual, True), (Hooked, False)])
def test_a_batch_that_is_not_understood_runs_whole_or_by_the_hook(module: Any, warned: bool) -> None:
    trained = Case(module=module, train=nets.images40, loaders=strange_loaders)
    record, oracle = fit_on_ranks(trained, layout(2, 1, "1f1b", 2)), fit_alone(trained)
    assert_same(record, oracle)
    assert warned == any("holds a Strange" in text and "split_microbatches" in text for text in record.warnings)


# ---- errors ----------------------------------------------------------------------------------------------------------


class Fickle(nets.Classifier):
    """The second microbatch goes another way."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2))
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            return next(self.model.parameters()).sum()
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss


class Raising(nets.Classifier):
    """One rank fails behind the network, in the midst of the schedule."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        if self.global_rank == 1 and batch_idx == 1:
            raise ValueError("these labels are wrong")
        return loss


def test_microbatches_take_the_same_way() -> None:
    with pytest.raises(RankError, match=r"calls network 'model' for microbatch 0, but none for microbatch 1"):
        fit_on_ranks(case(Fickle, batch=8), layout(2, 1, "1f1b", 4), timeout=60)


def test_an_error_in_a_step_ends_all_ranks_and_names_the_microbatch() -> None:
    with pytest.raises(RankError) as raised:
        fit_on_ranks(case(Raising, batch=8), layout(2, 1, "1f1b", 4), timeout=60)
    text = "\n".join(raised.value.errors.values())
    assert "these labels are wrong" in text
    assert "Raised by microbatch 0 of 4 in training_step, batch 1" in text


def test_manual_optimisation_needs_the_whole_batch() -> None:
    with pytest.raises(RankError, match=r"automatic_optimization=False.*schedule='gpipe'"):
        fit_on_ranks(case(Manual, batch=8), layout(2, 1, "1f1b", 4), timeout=60)


class Manual(nets.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
