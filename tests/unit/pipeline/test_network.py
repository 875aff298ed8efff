"""The network call with one rank per replica: an ordinary network, run in microbatches."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cnnpar.mesh import Mesh
from lightning_cnnpar.pipeline.network import PipelineNetwork
from tests.unit.pipeline.graphs import GraphNet, HandCut, Step, chain, conv, only, skips
from tests.unit.pipeline.pairs import Pair, images


@pytest.fixture(autouse=True)
def _sharp() -> None:
    torch.set_default_dtype(torch.float64)


def _pair(net: GraphNet, starts: list[int], microbatches: int, **options: Any) -> Pair:
    return Pair(net, starts, [0] * len(starts), microbatches, mesh=Mesh(), **options)


@pytest.mark.parametrize("microbatches", [1, 3, 4])
def test_training(microbatches: int) -> None:
    pair = _pair(skips(), [0, 2, 4], microbatches)
    for batch, size in [(8, 8), (5, 12), (1, 8), (2, 8)]:
        pair.step(images(batch, size))
    pair.train(False)
    with torch.no_grad():
        pair.call(images())


def test_gradients_of_gradients() -> None:
    pair = _pair(chain(), [0, 2], 2)
    x = images().requires_grad_()
    out, expected = pair.call(x)
    for outputs in (out, expected):
        (gradient,) = torch.autograd.grad(outputs.square().sum(), x, create_graph=True)
        torch.autograd.backward(gradient.square().sum())
    pair.check()


@pytest.mark.case("C24")
def test_statistics_of_the_whole_batch() -> None:
    steps: list[Step] = [("norm", nn.BatchNorm2d(3), ("in0",)), ("sum", lambda x: x.sum((1, 2, 3)), ("norm",))]
    pair = _pair(GraphNet(steps, ["sum"], only), [0], 3)
    for batch in (8, 7):
        x = images(batch)
        pair.network((x,), {}, label="step")
        pair.whole(x)
    pair.check()


def test_statistics_of_each_microbatch_on_demand() -> None:
    pair = _pair(chain(norm=True), [0], 4, deferred_batch_norm=False)
    pair.network((images(),), {}, label="step")
    counts = [buffer.item() for name, buffer in pair.net.named_buffers() if name.endswith("tracked")]
    assert counts == [4, 4, 4]


def test_one_microbatch_is_the_network_itself() -> None:
    """Bit for bit, dropout and BatchNorm included, with the user's generator."""
    pair = _pair(chain(norm=True, dropout=0.5), [0, 2], 1)
    x = images()
    torch.manual_seed(1)
    out = pair.network((x,), {}, label="step")
    after = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(out, pair.whole(x))
    assert torch.equal(torch.get_rng_state(), after)
    for one, other in zip(pair.net.buffers(), pair.whole.buffers(), strict=True):
        assert torch.equal(one, other)


def test_an_output_without_samples_runs_the_batch_whole() -> None:
    steps: list[Step] = [
        ("drop", nn.Dropout(0.5), ("in0",)),
        ("norm", nn.BatchNorm2d(3), ("drop",)),
        ("loss", lambda x: x.square().mean(), ("norm",)),
    ]
    pair = _pair(GraphNet(steps, ["loss"], only), [0, 1], 4)
    torch.manual_seed(2)
    with pytest.warns(UserWarning, match=r"output 0 has shape \(\) for a microbatch of 2 samples"):
        out = pair.network((images(),), {}, label="step")
    torch.manual_seed(2)
    expected = pair.whole(images())
    # The try in microbatches left no trace: neither in the generator nor in the statistics.
    assert torch.equal(out, expected)
    pair.check()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.network((images(),), {}, label="step")


@pytest.mark.case("C17")
def test_lists_of_samples_run_whole() -> None:
    """A detector on images of different sizes and boxes of different numbers."""

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = conv(3, 4)

        def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
            features = [self.body(image[None]).mean((2, 3)) for image in images]
            return [{"score": t["boxes"] @ f[0]} for f, t in zip(features, targets, strict=True)]

    class Whole:
        def program(self, args: Any, kwargs: Any) -> Any:
            from lightning_cnnpar import tree
            from lightning_cnnpar.partition.stage import Program, Stage

            leaves, spec = tree.flatten((args, kwargs))

            def function(root: nn.Module, *inputs: Any) -> Any:
                arguments, keywords = tree.unflatten(spec, inputs)
                return (), tuple(entry["score"] for entry in root(*arguments, **keywords))

            count = len(args[0])
            stage = Stage(
                index=0,
                rank=0,
                inputs=tuple(range(len(leaves))),
                receives=(),
                sends=(),
                outputs=tuple(range(count)),
                modules=(),
                function=function,
            )
            return Program(
                stages=(stage,), num_outputs=count, assembly=lambda outputs, _: [{"score": o} for o in outputs]
            )

    net = Detector()
    network = PipelineNetwork(net, Whole(), Mesh(), num_microbatches=2, name="model")
    pictures = [torch.randn(3, 4 + i, 5) for i in range(4)]
    targets = [{"boxes": torch.randn(i + 1, 4)} for i in range(4)]
    with pytest.warns(UserWarning, match="no tensor outside of a list has a batch dimension"):
        out = network((pictures, targets), {}, label="step")
    for one, other in zip(out, net(pictures, targets), strict=True):
        torch.testing.assert_close(one, other)


def test_an_error_leaves_the_network_usable() -> None:
    net = chain(norm=True)
    network = PipelineNetwork(net, HandCut(net, [0], [0]), Mesh(), num_microbatches=2, name="model")
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(RuntimeError):
        network((torch.randn(4, 7, 8, 8),), {}, label="step")
    torch.testing.assert_close(net.state_dict(), before)
    network((images(),), {}, label="step")
