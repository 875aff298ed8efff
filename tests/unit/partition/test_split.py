"""A cut network is the whole network: outputs, gradients, buffers, names; what can't be cut is named with a way out."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cnnpar import split, tree
from lightning_cnnpar.partition.split import (
    Partitioner,
    PartitionError,
    TooManyStagesError,
    UntraceableError,
)
from lightning_cnnpar.partition.stage import Program
from tests import nets

TOLERANCE = 1e-10


def run(program: Program, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All stages here, with every value that crosses a cut detached, as between ranks."""
    leaves, _ = tree.flatten((args, kwargs))
    values: dict[str, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    for stage in program.stages:
        sent, made = stage(root, [leaves[i] for i in stage.inputs], [values[name] for name in stage.receives])
        assert all(type(value) is Tensor for value in (*sent, *made))
        values.update(zip(stage.sends, sent, strict=True))
        outputs.update(zip(stage.outputs, made, strict=True))
    return program.assemble([outputs[i] for i in range(program.num_outputs)], leaves)


def assert_cut_right(whole: nn.Module, args: tuple[Any, ...], stages: int, **kwargs: Any) -> Partitioner:
    """Hold the stages against the whole network in training and evaluation, with gradients and buffers."""
    whole = whole.double()
    network = copy.deepcopy(whole)
    partitioner = Partitioner(network, stages)
    for training in (False, True):
        whole.train(training)
        network.train(training)
        program = partitioner.program(args, kwargs)
        assert len(program.stages) == stages
        own, own_spec = tree.flatten(run(program, network, args, kwargs))
        other, other_spec = tree.flatten(whole(*args, **kwargs))
        assert own_spec == other_spec
        for a, b in zip(own, other, strict=True):
            if isinstance(b, Tensor):
                assert (a - b).abs().max() <= TOLERANCE
            else:
                assert a == b
    for leaves in (own, other):
        sum(leaf.square().sum() for leaf in leaves if isinstance(leaf, Tensor)).backward()  # type: ignore[union-attr]
    for (name, a), (_, b) in zip(network.named_parameters(), whole.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None and b.grad is not None:
            assert (a.grad - b.grad).abs().max() <= TOLERANCE, name
    for (name, a), (_, b) in zip(network.named_buffers(), whole.named_buffers(), strict=True):
        assert (a - b).abs().max() <= TOLERANCE, name
    return partitioner


def images(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 3, 16, 16)), dtype=torch.float64)


@dataclasses.dataclass
class Prediction:
    logits: Tensor
    size: int = 4


class Named(NamedTuple):
    first: Tensor
    second: Tensor


class Shaped(nn.Module):
    """Uses a size of the first stage's input, and a method chain, in the last stage."""

    def __init__(self, output: str) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 6, 3, padding=1)
        self.b = nn.Conv2d(6, 6, 3, padding=1)
        self.c = nn.Conv2d(6, 6, 3, padding=1)
        self.d = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(6, 1, 1))
        self.output = output

    def forward(self, x: Tensor, mask: Tensor | None = None, *, gain: float = 1.0) -> Any:
        batch = x.size(0)
        early = self.a(x)
        y = F.relu(self.b(early), inplace=True)
        if mask is not None:
            y = y * mask
        y = self.c(y * self.scale) * gain
        logits = self.d(y.mean(dim=(2, 3)).view(batch, -1))
        if self.output == "dict":
            return {"logits": logits, "early": early, "nested": [y, (logits,)]}
        if self.output == "dataclass":
            return Prediction(logits=logits)
        if self.output == "namedtuple":
            return Named(logits, early)
        return logits


@pytest.mark.parametrize("output", ["tensor", "dict", "dataclass", "namedtuple"])
@pytest.mark.case("C73")
def test_outputs_of_any_container(output: str) -> None:
    assert_cut_right(Shaped(output), (images(),), 3)


def test_optional_and_keyword_inputs() -> None:
    assert_cut_right(Shaped("tensor"), (images(), images(2, 1, 16, 16)), 3)
    assert_cut_right(Shaped("tensor"), (images(),), 3, mask=images(2, 1, 16, 16), gain=0.5)


class Listed(nn.Module):
    """Takes a list and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = (nn.Conv2d(3, 3, 1) for _ in range(3))

    def forward(self, pair: list[Tensor], extra: dict[str, Tensor]) -> Tensor:
        left, right = pair
        return self.last(self.left(left) + self.right(right) + extra["bias"])  # type: ignore[no-any-return]


def test_list_and_dictionary_inputs() -> None:
    assert_cut_right(Listed(), ([images(), images()], {"bias": images()}), 3)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("make", [nets.plain, nets.Residual, nets.UNet], ids=["plain", "residual", "unet"])
@pytest.mark.case("C07")
def test_small_networks_with_batch_norm(make: Callable[..., nn.Module], stages: int) -> None:
    assert_cut_right(make(norm=True), (images(),), stages)


@pytest.mark.case("C03")
def test_two_branches() -> None:
    assert_cut_right(nets.TwoBranch(), (images(),), 3)


TORCHVISION = ["resnet18", "googlenet", "shufflenet_v2_x0_5", "mobilenet_v3_small", "regnet_y_400mf", "squeezenet1_1"]


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision_networks(name: str, stages: int) -> None:
    options = {"init_weights": False} if name == "googlenet" else {}
    network = torchvision.models.get_model(name, weights=None, **options)
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert_cut_right(network, (images(2, 3, 64, 64),), stages)


def test_parameters_are_placed_once_under_their_own_names() -> None:
    network = torchvision.models.resnet18(weights=None)
    partitioner = Partitioner(network, 2)
    program = partitioner.program((torch.randn(1, 3, 64, 64),), {})
    names = [name for name, _ in (*network.named_parameters(), *network.named_buffers())]
    assert set(partitioner.owners) == set(names)
    assert set(partitioner.owners.values()) == {0, 1}
    assert partitioner.owners["conv1.weight"] == 0
    assert partitioner.owners["fc.bias"] == 1
    assert partitioner.shared == frozenset()
    assert [stage.rank for stage in program.stages] == [0, 1]


class Auxiliary(nn.Module):
    """A head that only training uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)))
        self.head = nn.Linear(3, 4)
        self.aux = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.body(x)
        logits = self.head(y.mean(dim=(2, 3)))
        return (logits, self.aux(x.mean(dim=(2, 3)))) if self.training else logits


def test_heads_of_training_are_placed_by_a_first_call_in_evaluation() -> None:
    network = Auxiliary().eval()
    partitioner = Partitioner(network, 2)
    partitioner.program((torch.randn(2, 3, 8, 8),), {})
    before = dict(partitioner.owners)
    assert "aux.weight" in before
    assert not network.training
    network.train()
    partitioner.program((torch.randn(2, 3, 8, 8),), {})
    assert partitioner.owners == before


def test_another_batch_or_image_size_uses_the_same_program() -> None:
    partitioner = Partitioner(nets.UNet(), 3)
    first = partitioner.program((torch.randn(2, 3, 16, 16),), {})
    assert partitioner.program((torch.randn(5, 3, 32, 32),), {}) is first


class Autoencoder(nn.Module):
    """Two networks that training may call one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)))
        self.decoder = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))  # type: ignore[no-any-return]


def test_a_network_around_placed_ones_follows_them() -> None:
    network = Autoencoder()
    owners: dict[str, int] = {}
    for name in ("encoder", "decoder"):
        part = Partitioner(network.get_submodule(name), 2)
        part.program((torch.randn(2, 3, 8, 8),), {})
        owners.update({f"{name}.{key}": rank for key, rank in part.owners.items()})
    partitioner = Partitioner(network, 2, owners=owners)
    program = partitioner.program((torch.randn(2, 3, 8, 8),), {})
    assert [stage.rank for stage in program.stages] == [0, 1, 0, 1]
    assert partitioner.owners == owners
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(run(program, network, (x,), {}), network(x))


class Tied(nn.Module):
    """One head at three levels."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(6))
        self.head = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        features = []
        for level in self.levels:
            x = F.relu(level(x))
            features.append(x)
        return [self.head(feature) for feature in features[-3:]]


@pytest.mark.case("C20")
def test_tied_weights_stay_on_one_stage_where_they_can() -> None:
    partitioner = assert_cut_right(Tied(), (images(),), 3)
    assert partitioner.shared == frozenset()


class TiedEnds(nn.Module):
    """The first and the last layer share a weight, as in a tied autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8, bias=False)
        self.middle = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.middle:
            x = torch.tanh(layer(x))
        return F.linear(x, self.first.weight.t())


def test_tied_weights_of_both_ends_are_kept_by_both_stages() -> None:
    partitioner = assert_cut_right(TiedEnds(), (images(3, 4),), 2)
    assert partitioner.shared == {"first.weight"}


class Modes(nn.Module):
    """Parts without gradients and without autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.a(x)
        with torch.autocast("cpu", enabled=False):
            x = torch.tanh(self.b(x)).matmul(torch.eye(4, dtype=x.dtype))
        return self.c(x)  # type: ignore[no-any-return]


def test_gradient_mode_and_autocast_inside_a_forward_are_kept() -> None:
    assert_cut_right(Modes(), (images(3, 4),), 2)
    network = Modes()
    program = Partitioner(network, 2).program((torch.randn(3, 4),), {})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(program, network, (torch.randn(3, 4),), {}).dtype == torch.bfloat16


def test_hooks_of_users_fire() -> None:
    network = nets.Residual()
    seen: list[str] = []
    network.head.register_forward_hook(lambda *_: seen.append("head"))
    program = Partitioner(network, 2).program((torch.randn(2, 3, 8, 8),), {})
    assert seen == []
    run(program, network, (torch.randn(2, 3, 8, 8),), {})
    assert seen == ["head"]


def test_tracing_changes_nothing() -> None:
    network = nets.Residual(norm=True)
    before = copy.deepcopy(network.state_dict())
    randomness = torch.get_rng_state()
    Partitioner(network, 2).program((torch.randn(2, 3, 8, 8, generator=torch.Generator()),), {})
    assert torch.equal(torch.get_rng_state(), randomness)
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name])


# --- what is asked for ----------------------------------------------------------------------------------------------


@pytest.mark.case("C23")
def test_no_stage_is_empty_and_balance_follows_the_metric() -> None:
    five = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    assert all(stage.modules for stage in split(five, (torch.randn(2, 4),), 4).stages)
    early_time, late_parameters = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(6)], [nn.Linear(3, 400)]
    network = nn.Sequential(*early_time, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *late_parameters, nn.Linear(400, 400))
    x = torch.randn(2, 3, 32, 32)
    by_flops = split(network, (x,), 2, balance="flops")
    by_parameters = split(network, (x,), 2, balance="parameters")
    assert len(by_flops.stages[0].modules) < len(by_parameters.stages[0].modules)


@pytest.mark.case("C63")
def test_a_rank_twice_as_fast_gets_twice_the_work() -> None:
    network = nn.Sequential(*(nn.Linear(32, 32) for _ in range(9)))
    rows = split(network, (torch.randn(64, 32),), 2, balance=[2.0, 1.0]).rows
    assert [len(row.modules) for row in rows] == [6, 3]


def test_cut_points_start_stages() -> None:
    partition = split(nets.Residual(), (torch.randn(2, 3, 8, 8),), 3, cut_points=["blocks.1", "blocks.3"])
    assert partition.stages[1].modules[0].startswith("blocks.1")
    assert partition.stages[2].modules[0].startswith("blocks.3")


@pytest.mark.parametrize(
    ("cut_points", "message"),
    [
        (["blocks.1"], r"cut_points=\['blocks.1'\] makes 2 stages, pipeline_parallel_size is 3: name 2 modules"),
        (["blocks.1", "nothing"], r"no stage of 'Residual' can start at 'nothing'. Possible: "),
        (["blocks.3", "blocks.1"], r"not in the order in which they are called"),
    ],
)
def test_bad_cut_points(cut_points: list[str], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        split(nets.Residual(), (torch.randn(2, 3, 8, 8),), 3, cut_points=cut_points)


def test_more_stages_than_places() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(
        TooManyStagesError, match=r"can be cut into 2 stages at most, 5 were asked for.*_size=2 or less"
    ):
        split(network, (torch.randn(2, 4),), 5)


class Whimsical(nn.Module):
    """Decides on data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.sum() > 0:
            return self.second(y)  # type: ignore[no-any-return]
        return y  # type: ignore[no-any-return]


def test_untraceable_networks_are_named_with_the_line_and_three_ways_out() -> None:
    with pytest.raises(UntraceableError) as caught:
        split(Whimsical(), (torch.randn(2, 4),), 2)
    message = str(caught.value)
    assert "Whimsical" in message
    assert f'File "{__file__}"' in message
    assert "if y.sum() > 0:" in message
    assert all(f"  {number}. " in message for number in (1, 2, 3))


def test_a_child_that_decides_on_data_stays_whole() -> None:
    network = nn.Sequential(nn.Linear(4, 4), Whimsical(), nn.Linear(4, 4))
    assert_cut_right(network, (images(3, 4),), 2)


def test_the_networks_own_error_comes_first() -> None:
    with pytest.raises(RuntimeError, match=r"expected input.*to have 3 channels"):
        split(nets.plain(), (torch.randn(2, 5, 8, 8),), 2)


def test_table_is_readable() -> None:
    lines = split(nets.Residual(), (torch.randn(2, 3, 8, 8),), 2).table().splitlines()
    assert lines[0].split() == ["stage", "parameters", "FLOPs", "share", "modules"]
    assert len(lines) == 3
