"""The collective call over programs of the real partitioner: ordinary networks, nothing written for the pipeline."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from lightning_cnnpar import tree
from lightning_cnnpar.mesh import create_mesh
from lightning_cnnpar.partition.split import Partitioner
from lightning_cnnpar.pipeline.network import PipelineNetwork
from tests.ranks import run_ranks
from tests.unit.pipeline.pairs import TOLERANCE, mean_square


class UNet(nn.Module):
    """Skips by `torch.cat`, written as everybody writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = self._block(3, 8), self._block(8, 16), self._block(16, 16)
        self.up2, self.up1 = self._block(32, 8), self._block(16, 8)
        self.out = nn.Conv2d(8, 2, 1)

    @staticmethod
    def _block(channels_in: int, channels_out: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.GELU())

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> dict[str, Tensor]:
        one = self.down1(x)
        two = self.down2(nn.functional.max_pool2d(one, 2))
        middle = self.middle(nn.functional.max_pool2d(two, 2))
        two = self.up2(torch.cat([nn.functional.interpolate(middle, scale_factor=2), two], 1))
        one = self.up1(torch.cat([nn.functional.interpolate(two, scale_factor=2), one], 1))
        out = self.out(one)
        return {"mask": out if scale is None else out * scale, "features": two.mean((2, 3))}


def _resnet() -> nn.Module:
    net: nn.Module = torchvision.models.resnet18(num_classes=5, norm_layer=functools.partial(nn.GroupNorm, 4))
    return net


def _batch_norm_resnet() -> nn.Module:
    net: nn.Module = torchvision.models.resnet18(num_classes=5)
    return net


def _googlenet() -> nn.Module:
    options = {"aux_logits": True, "init_weights": False, "dropout": 0.0, "dropout_aux": 0.0}
    net: nn.Module = torchvision.models.googlenet(num_classes=5, **options)
    return net


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int, int]] = {
    # name: how to build, image size, ranks, microbatches
    "unet": (UNet, 16, 3, 3),
    "resnet, group norm": (_resnet, 32, 2, 3),
    "resnet, batch norm": (_batch_norm_resnet, 32, 2, 1),
    "googlenet, auxiliary heads": (_googlenet, 64, 2, 1),
}


def _train(rank: int, world_size: int, name: str) -> None:
    torch.set_default_dtype(torch.float64)
    build, size, _, microbatches = NETWORKS[name]
    net = build()
    whole = copy.deepcopy(net)
    partitioner = Partitioner(net, world_size, name=name)
    network = PipelineNetwork(net, partitioner, create_mesh(1, world_size), num_microbatches=microbatches, name=name)
    for batch, train in ((8, True), (5, True), (4, False)):
        net.train(train)
        whole.train(train)
        x = torch.randn(batch, 3, size, size)
        kwargs: dict[str, Any] = {"scale": torch.rand(batch, 1, 1, 1)} if name == "unet" else {}
        out, expected = network((x,), kwargs, label="step"), whole(x, **kwargs)
        torch.autograd.backward([mean_square(out), mean_square(expected)])
        assert tree.flatten(out)[1] == tree.flatten(expected)[1]
        _compare("outputs", tree.flatten(out)[0], tree.flatten(expected)[0])
        _compare_own(net, whole, partitioner, rank)


def _compare_own(net: nn.Module, whole: nn.Module, partitioner: Partitioner, rank: int) -> None:
    parameters, buffers = dict(whole.named_parameters()), dict(whole.named_buffers())
    own = {name for name, owner in partitioner.owners.items() if owner == rank}
    assert own
    for name, parameter in net.named_parameters():
        _compare(name, parameter.grad, parameters[name].grad if name in own else None)
    for name, buffer in net.named_buffers():
        if name in own:
            _compare(name, buffer, buffers[name])


def _compare(name: str, value: Any, expected: Any) -> None:
    if value is None or expected is None:
        assert value is expected, name
        return
    torch.testing.assert_close(value, expected, rtol=0, atol=TOLERANCE, msg=lambda text: f"{name}: {text}")


@pytest.mark.case("C01")
@pytest.mark.case("C04")
@pytest.mark.case("C73")
@pytest.mark.parametrize("name", NETWORKS)
def test_ordinary_networks(name: str) -> None:
    run_ranks(NETWORKS[name][2], _train, name)
