"""BatchNorm in microbatches and over replicas, precision, and memory format: what is exact and what is near."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_cnnpar import HybridPrecision
from tests import nets
from tests.fitting import Case, Layout, assert_same_tensors, assert_same_tree
from tests.parity.stories import Stories, Story


def first_norm() -> nets.Classifier:
    """Frozen up to its first BatchNorm, whose input is then that of one process, whatever happens behind it."""
    network = nets.plain(norm=True)
    network[0].requires_grad_(False)
    return nets.Classifier(network)


def norms() -> nets.Classifier:
    return nets.Classifier(nets.Residual(norm=True))


class Permuted(nn.Module):
    """BatchNorm over features that were moved behind the pixels: its input isn't contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.flat, self.head = nn.BatchNorm2d(8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv1(x).permute(0, 1, 3, 2))
        x = torch.relu(self.conv2(x)).flatten(2).permute(0, 2, 1)
        return self.head(self.flat(x.permute(0, 2, 1)).mean(dim=2))


def permuted() -> nets.Classifier:
    return nets.Classifier(Permuted())


class Watched(nets.Classifier):
    """Notes on each rank what its own layers get: dtypes and memory formats."""

    def __init__(self, network: nn.Module | None = None) -> None:
        super().__init__(network or nets.plain(), nets.sgd)
        self.extra: list[tuple[str, str, bool]] = []
        for name, module in self.model.named_modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                module.register_forward_hook(self._watch(name))

    def _watch(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            (given,) = inputs
            is_channels_last = given.dim() == 4 and given.is_contiguous(memory_format=torch.channels_last)
            self.extra.append((name, str(output.dtype), is_channels_last))

        return hook


def pointwise() -> nn.Sequential:
    """With 1x1 convolutions, whose gradients come in strides of their own."""
    widths = (3, 8, 8, 8)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.Conv2d(outputs, outputs, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def watched_pointwise() -> Watched:
    return Watched(pointwise())


def channels_last() -> Watched:
    return Watched(pointwise()).to(memory_format=torch.channels_last)


class Overflowing(nets.Classifier):
    """The gradient of one weight, on one stage, is infinite in the third step."""

    where = "model.stem.weight"

    def __init__(self) -> None:
        super().__init__(nets.Residual(blocks=2))
        self.extra: list[float] = []
        self.at = -1
        self.get_parameter(self.where).register_hook(lambda grad: grad * (float("inf") if self.at == 2 else 1.0))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.at = batch_idx

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy = self.trainer.strategy
        self.extra.append(float(strategy.precision_plugin.scaler.get_scale()))


class OverflowingLast(Overflowing):
    where = "model.head.weight"


def images24() -> nets.Images:
    return nets.Float32Images(24)


def doubles24() -> nets.Images:
    return nets.Images(24)


FOUR: dict[str, Any] = {"options": {"num_microbatches": 4}}
ONE: dict[str, Any] = {"options": {"num_microbatches": 1}}
SYNCED: dict[str, Any] = {"trainer": {"sync_batchnorm": True}, **ONE}
HALF = Case(Watched, images24, double=False, trainer={"precision": "bf16-mixed"})
LAST = HybridPrecision("32-true", channels_last=True)


def scaled(module: Callable[[], Any], plugin: Callable[..., Any], **more: Any) -> Case:
    """Loss scaling with float16, which Lightning replaces by bfloat16 on CPU unless it is given as a plugin."""
    plugins = [plugin("16-mixed", **more)]
    clipped = {"plugins": plugins, "precision": None, "gradient_clip_val": 0.5}
    return Case(module, images24, batch=4, double=False, trainer=clipped, options={"num_microbatches": 2})


STORIES = Stories(
    {
        "C24": Story(Case(first_norm, doubles24, **FOUR)),
        "C24 with one microbatch": Story(Case(norms, doubles24, nets.images12, **ONE)),
        "C24 in every layer": Story(Case(norms, doubles24, **FOUR)),
        "C24 not deferred": Story(
            Case(first_norm, doubles24, options={"num_microbatches": 4, "deferred_batch_norm": False})
        ),
        "C28": Story(Case(permuted, doubles24, **SYNCED), Layout(1, 2)),
        "C28 over stages": Story(Case(permuted, doubles24, **SYNCED), Layout(2, 2)),
        "C59": Story(
            Case(watched_pointwise, images24, double=False, trainer={"plugins": [LAST], "precision": None}),
            Layout(2, 2),
            oracle=Case(channels_last, images24, double=False),
            tolerance=1e-5,
        ),
        "autocast": Story(HALF, tolerance=2e-2),
        "bf16-true": Story(Case(norms, images24, double=False, trainer={"precision": "bf16-true"}, **ONE)),
        "overflow": Story(
            scaled(Overflowing, HybridPrecision, channels_last=None),
            Layout(2, 2),
            oracle=scaled(Overflowing, MixedPrecision, device="cpu"),
        ),
        "overflow at the end": Story(
            scaled(OverflowingLast, HybridPrecision, channels_last=None),
            Layout(2, 2),
            oracle=scaled(OverflowingLast, MixedPrecision, device="cpu"),
        ),
    }
)


def buffers(state: dict[str, Tensor], layer: str = "") -> dict[str, Tensor]:
    kept = ("running_mean", "running_var", "num_batches_tracked")
    return {name: value for name, value in state.items() if name.endswith(kept) and layer in name}


@pytest.mark.case("C24")
def test_case_c24_running_statistics_are_those_of_the_whole_batch() -> None:
    record, oracle = STORIES.record("C24"), STORIES.oracle("C24")
    first = buffers(oracle.state, "model.1.")
    assert len(first) == 3
    assert_same_tensors(buffers(record.state, "model.1."), first, 1e-10)
    assert all(value == 3 for name, value in record.state.items() if "num_batches" in name)


@pytest.mark.case("C24")
def test_case_c24_one_microbatch_is_exact_everywhere() -> None:
    STORIES.hold("C24 with one microbatch")


@pytest.mark.case("C24")
def test_case_c24_every_layer_counts_a_batch_once_and_stays_near() -> None:
    record, oracle = STORIES.record("C24 in every layer"), STORIES.oracle("C24 in every layer")
    for name, value in buffers(oracle.state).items():
        assert (record.state[name] - value).abs().max() < 0.2, name
        assert "num_batches" not in name or record.state[name] == 3


@pytest.mark.case("C24")
def test_case_c24_without_deferring_each_microbatch_counts() -> None:
    record = STORIES.record("C24 not deferred")
    assert all(value == 12 for name, value in record.state.items() if "num_batches" in name)


@pytest.mark.case("C28")
@pytest.mark.parametrize("story", ["C28", "C28 over stages"])
def test_case_c28_synchronised_statistics_of_strided_input(story: str) -> None:
    STORIES.hold(story)


@pytest.mark.case("C59")
def test_case_c59_channels_last_is_kept_over_the_wire() -> None:
    record, oracle = STORIES.hold("C59")
    assert_same_tree(record.checkpoint["state_dict"], oracle.checkpoint["state_dict"], tolerance=1e-5)
    for rank, seen in enumerate(record.extra):
        convolutions = [(name, last) for name, _, last in seen if name != "14"]
        # The user's own images come as they are; everything behind the first layer is channels_last.
        assert all(last for name, last in convolutions if name != "0"), f"rank {rank}"
        assert len({name for name, _ in convolutions}) >= 2
    assert not any("stride" in text for text in record.warnings)


def test_autocast_reaches_every_stage() -> None:
    record, oracle = STORIES.record("autocast"), STORIES.oracle("autocast")
    for seen in record.extra:
        assert seen
        assert {dtype for _, dtype, _ in seen} == {"torch.bfloat16"}
    assert record.extra[0][0][0] != record.extra[1][0][0]
    for name, value in oracle.state.items():
        assert value.dtype == torch.float32
        assert (record.state[name] - value).abs().max() < 2e-2, name


def test_half_precision_of_everything() -> None:
    record, _ = STORIES.hold("bf16-true")
    assert record.state["model.head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("story", ["overflow", "overflow at the end"])
def test_all_ranks_skip_a_step_that_overflows_on_one(story: str) -> None:
    record, oracle = STORIES.record(story), STORIES.oracle(story)
    assert all(scales == oracle.extra for scales in record.extra)
    assert len(set(oracle.extra)) == 2
    # Six batches, one of which was skipped.
    assert len(record.gradients) == len(oracle.gradients) == 5
    for name, value in oracle.state.items():
        assert (record.state[name] - value).abs().max() < 2e-3, name
    kept = (record.checkpoint["MixedPrecision"], oracle.checkpoint["MixedPrecision"])
    assert kept[0] == kept[1]
