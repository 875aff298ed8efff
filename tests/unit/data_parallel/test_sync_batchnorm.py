"""Turning BatchNorm layers into synchronised ones and back, and what they do in one process."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn

from lightning_cnnpar.data_parallel.sync_batchnorm import (
    SyncBatchNorm,
    convert_sync_batchnorm,
    revert_sync_batchnorm,
    set_statistics_group,
    statistics_group,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.SyncBatchNorm(2))
        self.flat = nn.BatchNorm1d(2)
        self.frozen = nn.BatchNorm3d(2).eval()
        self.frozen.weight.requires_grad_(False)

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.flat(self.layers[1](self.layers[0](values)).mean((2, 3)))
        return output


class Renamed(nn.BatchNorm2d):
    """Only another name."""


class Activated(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input).relu()


def test_layers_stay_the_same_objects() -> None:
    net = Net()
    calls: list[int] = []
    net.flat.register_forward_hook(lambda *_: calls.append(1))
    before = dict(net.named_modules())
    tensors = dict([*net.named_parameters(), *net.named_buffers()])
    flags = {name: module.training for name, module in net.named_modules()}
    assert convert_sync_batchnorm(net) is net
    assert dict(net.named_modules()) == before
    after = dict([*net.named_parameters(), *net.named_buffers()])
    assert list(after) == list(tensors)
    assert all(after[name] is tensor for name, tensor in tensors.items())
    assert {name: module.training for name, module in net.named_modules()} == flags
    assert not net.frozen.weight.requires_grad
    for layer in (net.layers[1], net.layers[2], net.flat, net.frozen):
        assert type(layer) is SyncBatchNorm
    net(torch.randn(3, 1, 2, 2))
    assert calls == [1]
    assert revert_sync_batchnorm(net) is net
    kinds = [type(layer) for layer in (net.layers[1], net.layers[2], net.flat, net.frozen)]
    assert kinds == [nn.BatchNorm2d, nn.SyncBatchNorm, nn.BatchNorm1d, nn.BatchNorm3d]
    assert vars(net.flat).keys() == vars(nn.BatchNorm1d(2)).keys()
    assert vars(net.layers[2]).keys() == vars(nn.SyncBatchNorm(2)).keys()


def test_a_single_layer_is_converted_in_place() -> None:
    layer = nn.BatchNorm2d(2)
    assert convert_sync_batchnorm(layer) is layer
    assert isinstance(layer, SyncBatchNorm)
    convert_sync_batchnorm(layer)  # twice is once
    revert_sync_batchnorm(layer)
    assert type(layer) is nn.BatchNorm2d


def test_in_one_process_it_is_batchnorm() -> None:
    torch.manual_seed(0)
    plain, synchronised = Net(), Net()
    synchronised.load_state_dict(plain.state_dict())
    convert_sync_batchnorm(synchronised)
    for training in (True, True, False):
        values = torch.randn(3, 1, 2, 2)
        outputs = [net.train(training)(values) for net in (plain, synchronised)]
        assert torch.equal(*outputs)
    for mine, other in zip(synchronised.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, other)
    assert synchronised.flat.last_count == 3
    assert synchronised.layers[1].last_count == 12


@pytest.mark.parametrize("momentum", [0.3, None])
def test_momentum(momentum: float | None) -> None:
    plain, synchronised = (
        nn.BatchNorm1d(2, momentum=momentum),
        convert_sync_batchnorm(nn.BatchNorm1d(2, momentum=momentum)),
    )
    for _ in range(3):
        values = torch.randn(4, 2)
        assert torch.equal(plain(values), synchronised(values))
    assert torch.equal(plain.running_var, synchronised.running_var)  # type: ignore[arg-type]


def test_copies_and_pickles() -> None:
    net = convert_sync_batchnorm(Net())
    net(torch.randn(3, 1, 2, 2))
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert isinstance(twin.flat, SyncBatchNorm)
        assert type(revert_sync_batchnorm(twin).flat) is nn.BatchNorm1d


def test_subclasses_that_only_rename_are_converted() -> None:
    layer: nn.Module = Renamed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_sync_batchnorm(layer)
    assert isinstance(layer, SyncBatchNorm)
    assert type(revert_sync_batchnorm(layer)) is Renamed


@pytest.mark.parametrize("layer", [Activated(2), nn.LazyBatchNorm2d()], ids=["forward", "lazy"])
def test_layers_that_do_something_else_are_left_alone_and_named(layer: nn.Module) -> None:
    net = nn.Sequential(layer)
    with pytest.warns(UserWarning, match="'0' is a .* keeps its own statistics on each replica"):
        convert_sync_batchnorm(net)
    assert not isinstance(net[0], SyncBatchNorm)


def test_a_layer_takes_no_group() -> None:
    with pytest.raises(ValueError, match="holds no process group"):
        SyncBatchNorm(2, process_group=object())
    assert SyncBatchNorm(2).process_group is None
    set_statistics_group(None)
    assert statistics_group() is None


@pytest.mark.parametrize("shape", [(3,), (3, 0, 2)])
def test_inputs_without_channels_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one channel"):
        SyncBatchNorm(2)(torch.ones(shape))
