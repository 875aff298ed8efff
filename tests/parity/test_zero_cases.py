"""What users do, with parameters cut over replicas: several optimizers, mixed precision, unused parameters, copies."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_cnnpar import HybridPrecision
from lightning_cnnpar.data_parallel import sharding
from tests import nets
from tests.fitting import Case, Layout, Record, assert_same_tensors, fit_alone, fit_on_ranks
from tests.parity import test_cases_optimizers as optimizers
from tests.parity import test_cases_statistics as statistics
from tests.parity.stories import Stories, Story
from tests.ranks import RankError


def small_units() -> list[pl.Callback]:
    """Called on every rank: units of a layer each, so that networks of a few kilobytes have many."""
    sharding.SMALLEST_UNIT = 1
    return []


def small_units_and_finetuning() -> list[pl.Callback]:
    return [*small_units(), *optimizers.finetuning()]


class Gan(pl.LightningModule):
    """Two networks, two optimizers, stepped by hand. Noise comes from the images, so that replicas have their own."""

    def __init__(self, toggles: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggles = toggles
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(3, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1)
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.LeakyReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.Flatten(), nn.Linear(128, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        noise = F.avg_pool2d(real, 2)
        of_generator, of_discriminator = self.optimizers()
        if self.toggles:
            self.toggle_optimizer(of_generator)
        loss = F.softplus(-self.discriminator(self.generator(noise))).mean()
        # Drops what the other optimizer's turn has left, after the forward.
        of_generator.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(of_generator, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        of_generator.step()
        if self.toggles:
            self.untoggle_optimizer(of_generator)
            self.toggle_optimizer(of_discriminator)
        fake = self.generator(noise).detach()
        loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()
        of_discriminator.zero_grad()
        self.manual_backward(loss)
        of_discriminator.step()
        if self.toggles:
            self.untoggle_optimizer(of_discriminator)
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        adam = functools.partial(torch.optim.Adam, lr=1e-3, betas=(0.5, 0.999))
        return [adam(self.generator.parameters()), adam(self.discriminator.parameters())]


class Residual30(nets.Classifier):
    """Residual blocks with BatchNorm, and the types of buffers after each step."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(norm=True), nets.adamw)
        self.extra: list[set[torch.dtype]] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        norms = [m for m in self.modules() if isinstance(m, (nn.BatchNorm2d, nn.SyncBatchNorm))]
        tensors = [t for m in norms for t in (m.running_mean, m.running_var, m.weight, m.bias)]
        self.extra.append({t.dtype for t in tensors if t.device.type != "meta"})


class Accumulating(nets.Classifier):
    """Two backward passes by hand before a step, and a look at gradients in between."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2), nets.adamw)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for images in (batch[0], batch[0].flip(-1)):
            self.manual_backward(F.cross_entropy(self.model(images), batch[1]))
        optimizer.step()


class SkippingBranch(nn.Module):
    """An opaque part that one replica leaves out; fx can't follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Conv2d(8, 8, 3, padding=1)
        self.sometimes = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.always(x))
        return x + self.sometimes(x) if float(x.detach().sum()) > 0 and skips_not() else x


def skips_not() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() % 2 == 0


class Branching(nets.Classifier):
    def __init__(self) -> None:
        network = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            SkippingBranch(),
            SkippingBranch(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 4),
        )
        super().__init__(network, nets.adamw)


class Recomputing(nn.Module):
    """Drops its activations by torch's own checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.body, x, use_reentrant=False)


def recomputing() -> nets.Classifier:
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(Recomputing() for _ in range(4)), *head)
    return nets.Classifier(body, nets.adamw)


def branching() -> nets.Classifier:
    return Branching()


def zero(stage: int, pipeline: int = 1, data: int = 2, **more: Any) -> Layout:
    return Layout(pipeline, data, {"zero_stage": stage, **more})


def case(module: Callable[[], pl.LightningModule], **more: Any) -> Case:
    return Case(module, nets.images40, callbacks=small_units, **more)


def own_layout(story: Case, **more: Any) -> Case:

    return dataclasses.replace(story, callbacks=more.pop("callbacks", small_units), **more)


FINETUNED = own_layout(optimizers.FINETUNED, callbacks=small_units_and_finetuning)
STORIES = Stories(
    {
        **{
            f"C35 {kind} zero={stage}": Story(case(functools.partial(Gan, kind == "toggled")), zero(stage))
            for kind in ("toggled", "plain")
            for stage in (1, 2, 3)
        },
        "C35 toggled P=2": Story(case(functools.partial(Gan, True)), zero(2, 2)),
        "several": Story(case(optimizers.Several), zero(3, 2)),
        "groups": Story(case(optimizers.Groups, trainer={"max_epochs": 1, "max_steps": 5}), zero(2)),
        "unfreezing": Story(case(optimizers.Unfreezing), zero(3)),
        "finetuning zero=1": Story(FINETUNED, zero(1)),
        "finetuning zero=3": Story(FINETUNED, zero(3)),
        "accumulating zero=1": Story(case(Accumulating), zero(1)),
        "accumulating zero=3": Story(case(Accumulating), zero(3)),
        "recomputing": Story(case(recomputing), zero(3)),
        "recomputing over stages": Story(case(recomputing), zero(3, 2)),
        "synced": Story(own_layout(Case(statistics.norms, nets.images40, **statistics.SYNCED)), zero(3)),
    }
)


@pytest.mark.case("C35")
@pytest.mark.parametrize("name", [name for name in STORIES.names if name.startswith("C35")])
def test_case_c35_two_optimizers(name: str) -> None:
    STORIES.hold(name)


@pytest.mark.parametrize("name", [name for name in STORIES.names if not name.startswith("C35")])
def test_zero_with(name: str) -> None:
    STORIES.hold(name)


@pytest.mark.case("C30")
@pytest.mark.parametrize("layout", [zero(3), zero(3, 2, num_microbatches=1)], ids=["1x2", "2x2"])
def test_case_c30_batch_norm_stays_in_float32(layout: Layout) -> None:
    trainer = {"precision": "bf16-mixed", "max_steps": 3, "sync_batchnorm": True}
    mixed = Case(Residual30, statistics.images24, callbacks=small_units, double=False, trainer=trainer)
    record = fit_on_ranks(mixed, layout)
    without = fit_on_ranks(mixed, Layout(layout.pipeline, layout.data, {**layout.options, "zero_stage": 0}))
    assert record.extra == [[{torch.float32}] * 3] * layout.world
    assert_same_tensors(record.state, without.state, 1e-4)


@pytest.mark.parametrize("layout", [zero(1, 2), zero(2), zero(3, 2)], ids=["2x2-zero1", "1x2-zero2", "2x2-zero3"])
@pytest.mark.parametrize("module", [statistics.Overflowing, statistics.OverflowingLast])
def test_all_shards_skip_a_step_that_overflows_on_one(module: Any, layout: Layout) -> None:
    record = fit_on_ranks(statistics.scaled(module, HybridPrecision, channels_last=None), layout)
    oracle = oracle_of_overflow(module)
    assert all(scales == oracle.extra for scales in record.extra)
    assert len(set(oracle.extra)) == 2
    assert len(record.gradients) == len(oracle.gradients) == 5
    for name, value in oracle.state.items():
        assert (record.state[name] - value).abs().max() < 2e-3, name


@functools.cache
def oracle_of_overflow(module: Any) -> Record:

    return fit_alone(statistics.scaled(module, MixedPrecision, device="cpu"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_with_other_unused_parameters_do_not_get_out_of_step(stage: int) -> None:
    whole = fit_on_ranks(case(branching), Layout(1, 2))
    record = fit_on_ranks(case(branching), zero(stage))
    assert len(record.gradients) == 5
    assert_same_tensors(record.state, whole.state, 1e-10)


@pytest.mark.parametrize("compression", ["bf16", "int8", "powersgd"])
def test_zero_with_compression(compression: str) -> None:
    floats = Case(functools.partial(nets.Classifier, None, nets.sgd), statistics.images24, double=False)
    whole = fit_on_ranks(floats, Layout(1, 2, {"compression": compression}))
    record = fit_on_ranks(floats, zero(2, compression=compression))
    assert_same_tensors(record.state, whole.state, 1e-3)


def test_one_replica_has_nothing_to_cut() -> None:
    record = fit_on_ranks(case(functools.partial(nets.Classifier, None, nets.sgd)), zero(2, 2, 1))
    assert any("zero_stage=2 has nothing to cut" in text for text in record.warnings)


class Penalised(nets.Classifier):
    """Reads parameters in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        penalty = sum(p.square().sum() for p in self.parameters())
        return super().training_step(batch, batch_idx) + 1e-3 * penalty


def test_parameters_read_in_the_step_are_there_with_stage_2() -> None:
    Stories({"penalty": Story(case(Penalised), zero(2))}).hold("penalty")


def test_parameters_read_in_the_step_are_refused_by_name_with_stage_3() -> None:
    # The first step finds them whole: they are cut with the first call of the network.
    with pytest.raises(RankError, match=r"'model.0.weight' was read by `square` outside of the network's own forward"):
        fit_on_ranks(case(Penalised), zero(3))
