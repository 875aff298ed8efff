"""How a network is called: other sizes, no batch, hooks, the user's own checkpointing, compiled code."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_cnnpar.partition.split import Partitioner, UntraceableError, split
from tests import nets


class Padded(nn.Module):
    """Pads odd sizes: a branch on the shape, as U-Nets have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.shape[-1] % 2:
            x = F.pad(x, (0, 1))
        return self.second(x)


def test_another_branch_gets_a_program_of_its_own() -> None:
    network = Padded()
    even, odd = torch.randn(4, 3, 8, 8), torch.randn(3, 3, 8, 7)
    partition = split(network, (even,), 2)
    for images in (even, odd, even[:1], odd[:2]):
        torch.testing.assert_close(partition(images), network(images))
    partitioner = Partitioner(network, 2)
    assert partitioner.program((even,), {}) is partitioner.program((even[:1],), {})
    assert partitioner.program((even,), {}) is not partitioner.program((odd,), {})


@pytest.mark.parametrize(
    ("network", "whole", "batch"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)), (3, 8, 8), (5, 3, 8, 8)),
        (nn.Sequential(nn.Flatten(0), nn.Linear(12, 4), nn.Linear(4, 4)), (3, 2, 2), None),
        (nn.Sequential(nn.Linear(12, 4), nn.Linear(4, 4)), (12,), (5, 12)),
    ],
)
def test_dimension_zero_is_the_batch_only_if_it_can_change(network: nn.Module, whole: Any, batch: Any) -> None:
    assert not Partitioner(network, 2).program((torch.randn(whole),), {}).is_batched
    if batch is not None:
        assert Partitioner(network, 2).program((torch.randn(batch),), {}).is_batched


def test_hooks_see_no_tensors_without_data() -> None:
    network, seen = nets.plain(), []
    for module in network.modules():
        module.register_forward_hook(lambda module, inputs, output: seen.append(output))
    Partitioner(network, 2).program((torch.randn(4, 3, 8, 8),), {})
    assert seen == []


class Counted(nets.Block):
    """Counts its forwards."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.__class__.calls += 1
        return super().forward(x)


class Recomputing(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.reentrant = nn.Conv2d(3, 8, 1), reentrant
        self.blocks = nn.ModuleList([Counted(8, False) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return checkpoint(lambda y: 2 * y, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_a_module_is_kept(reentrant: bool) -> None:
    network, images = Recomputing(reentrant), torch.randn(2, 3, 8, 8)
    partition = split(network, (images,), 2)
    assert all(partition.parameters)
    Counted.calls = 0
    output = partition(images)
    assert Counted.calls == 4
    output.sum().backward()
    assert Counted.calls == 8
    own = {name: parameter.grad for name, parameter in network.named_parameters()}
    network.zero_grad()
    network(images).sum().backward()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(own[name], parameter.grad)


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(swish)


class StraightThrough(torch.autograd.Function):
    """Rounds, and hands the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def rounded() -> Any:
    return StraightThrough.apply


class Reversed(torch.autograd.Function):
    """Does nothing that could be seen but to turn the gradient round."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


def reverse() -> Any:
    return Reversed.apply


class Compiled(nn.Module):
    """Calls a function that can't be followed, between layers or in a module of its own."""

    def __init__(self, function: Any, wrapped: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        self.function = Wrapped(function) if wrapped else function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


class Wrapped(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("make", [scripted, rounded, reverse])
def test_functions_that_cannot_be_followed(make: Callable[[], Any]) -> None:
    function = make()
    images = torch.randn(2, 3, 4, 4)
    with pytest.raises(UntraceableError, match="of their own"):
        split(Compiled(function, wrapped=False), (images,), 2)
    network = Compiled(function, wrapped=True)
    partition = split(network, (images,), 2)
    partition(images).sum().backward()
    own = network.first.weight.grad
    network.zero_grad()
    network(images).sum().backward()
    assert own is not None
    assert own.abs().sum() > 0
    torch.testing.assert_close(own, network.first.weight.grad)
