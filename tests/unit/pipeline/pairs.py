"""A cut network beside the same network in one piece, on each rank."""

import copy
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_cnnpar import tree
from lightning_cnnpar.mesh import Mesh, create_mesh
from lightning_cnnpar.pipeline.network import PipelineNetwork
from tests.unit.pipeline.graphs import GraphNet, HandCut

TOLERANCE = 1e-10


class Pair:
    """Calls both and compares them, parameter by parameter."""

    def __init__(
        self,
        net: GraphNet,
        starts: Sequence[int],
        ranks: Sequence[int],
        microbatches: int,
        *,
        mesh: Mesh | None = None,
        name: str = "model",
        **options: Any,
    ) -> None:
        self.net, self.whole = net, copy.deepcopy(net)
        self.mesh = create_mesh(1, max(ranks) + 1, timeout=timedelta(seconds=20)) if mesh is None else mesh
        self.network = PipelineNetwork(
            net, HandCut(net, starts, ranks), self.mesh, num_microbatches=microbatches, name=name, **options
        )
        stages = net.cut(starts, ranks).stages
        self.own = {name for stage in stages if stage.rank == self.mesh.pipeline_rank for name in stage.modules}
        self.calls = 0

    def call(self, *args: Any, label: str = "training_step, batch 0") -> tuple[Any, Any]:
        """Outputs of the cut network and of the whole one, after comparing them."""
        self.calls += 1
        out, expected = self.network(args, {}, label=label), self.whole(*args)
        self.compare(f"outputs of call {self.calls}", out, expected)
        return out, expected

    def step(self, *args: Any, loss: Callable[[Any], Tensor] | None = None) -> None:
        """Forward, backward and comparison of everything."""
        out, expected = self.call(*args)
        loss = mean_square if loss is None else loss
        torch.autograd.backward([loss(out), loss(expected)])
        self.check()

    def check(self) -> None:
        """Compare gradients and buffers of this rank's stages; the others have no gradient here."""
        expected = dict(self.whole.named_parameters())
        for name, parameter in self.net.named_parameters():
            if name.split(".")[0] in self.own:
                self.compare(name, parameter.grad, expected[name].grad)
            else:
                assert parameter.grad is None, name
        buffers = dict(self.whole.named_buffers())
        for name, buffer in self.net.named_buffers():
            if name.split(".")[0] in self.own:
                self.compare(name, buffer, buffers[name])

    def train(self, mode: bool) -> None:
        self.net.train(mode)
        self.whole.train(mode)

    def zero_grad(self) -> None:
        self.net.zero_grad()
        self.whole.zero_grad()

    @staticmethod
    def compare(name: str, value: Any, expected: Any) -> None:
        leaves, spec = tree.flatten(value)
        others, other_spec = tree.flatten(expected)
        assert spec == other_spec, name
        for leaf, other in zip(leaves, others, strict=True):
            if leaf is None or other is None:
                assert leaf is other, f"{name}: {leaf} and {other}"
                continue
            assert leaf.requires_grad == other.requires_grad, name
            torch.testing.assert_close(leaf, other, rtol=0, atol=TOLERANCE, msg=lambda text: f"{name}: {text}")


def mean_square(outputs: Any) -> Tensor:
    """A loss of any outputs."""
    leaves, _ = tree.flatten(outputs)
    terms = [leaf.square().mean() for leaf in leaves]
    return torch.stack(terms).sum()


def images(batch: int = 8, size: int = 8) -> Tensor:
    return torch.randn(batch, 3, size, size)
