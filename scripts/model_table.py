"""Cuts every torchvision classification and segmentation network and holds it against the whole network.

    python -m scripts.model_table [--models NAME ...] [--write]

For each network, in 2 and 4 stages: outputs in training and evaluation, every gradient and every buffer after a
training step are compared with the whole network; `--write` puts the table into `docs/models.md`.
"""

import argparse
import copy
import dataclasses
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from lightning_cnnpar import split, tree

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
STAGES = (2, 4)
# float32; a network of a hundred layers collects this much from sums in another order.
TOLERANCE = 1e-3

_SIZES = {"inception_v3": 299, "alexnet": 96, "vit_h_14": 224}
_LARGE = ("vit", "swin", "maxvit")


@dataclasses.dataclass(frozen=True)
class Result:
    """One network in one number of stages.

    Attributes:
        model: Its name in torchvision.
        stages: Number of stages.
        problem: What differed; empty if nothing did.
        crossing: Tensors that each cut sends.
        imbalance: Slowest stage's share of the operations, times the number of stages.
        seconds: To trace and cut.
    """

    model: str
    stages: int
    problem: str
    crossing: tuple[int, ...] = ()
    imbalance: float = 0.0
    seconds: float = 0.0


def all_models() -> list[str]:
    """The names of torchvision's classification and segmentation networks."""
    classification = torchvision.models.list_models(module=torchvision.models)
    return [*classification, *torchvision.models.list_models(module=torchvision.models.segmentation)]


def build(name: str) -> tuple[nn.Module, Tensor]:
    """A network with random weights, and an input of two images."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"weights": None}
    if name in torchvision.models.list_models(module=torchvision.models.segmentation):
        options.update(weights_backbone=None, aux_loss=True if "lraspp" not in name else None)
        options = {key: value for key, value in options.items() if value is not None or key.startswith("weights")}
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    size = _SIZES.get(name, 224 if name.startswith(_LARGE) else 64)
    return torchvision.models.get_model(name, **options), torch.randn(2, 3, size, size)


def check(name: str, stages: int) -> Result:
    """Cut one network and compare."""
    whole, images = build(name)
    network = copy.deepcopy(whole)
    begin = time.perf_counter()
    try:
        partition = split(network, (images,), stages)
        seconds = time.perf_counter() - begin
        problem = _compare(network, partition, whole, images)
    except Exception as error:
        return Result(name, stages, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    rows = partition.rows
    imbalance = stages * max(row.share for row in rows)
    crossing = tuple(len(stage.sends) for stage in partition.stages[:-1])
    return Result(name, stages, problem, crossing, imbalance, seconds)


def _compare(network: nn.Module, partition: Any, whole: nn.Module, images: Tensor) -> str:
    for training in (False, True):
        network.train(training)
        whole.train(training)
        torch.manual_seed(1)
        own, own_spec = tree.flatten(partition(images))
        torch.manual_seed(1)
        other, other_spec = tree.flatten(whole(images))
        if own_spec != other_spec:
            return "output structure differs"
        for a, b in zip(own, other, strict=True):
            if not _close(a, b):
                return "outputs differ"
    for leaves in (own, other):
        sum(leaf.square().mean() for leaf in leaves).backward()
    for (key, a), (_, b) in zip(network.named_parameters(), whole.named_parameters(), strict=True):
        if (a.grad is None) != (b.grad is None) or (a.grad is not None and not _close(a.grad, b.grad)):
            return f"gradient of {key} differs"
    for (key, a), (_, b) in zip(network.named_buffers(), whole.named_buffers(), strict=True):
        if not _close(a, b):
            return f"buffer {key} differs"
    return ""


def _close(a: Tensor, b: Any) -> bool:
    a, b = a.detach(), b.detach()
    scale = float(b.abs().max()) if b.numel() else 0.0
    return bool(((a - b).abs() <= TOLERANCE * max(scale, 1e-6)).all())


def page(results: Sequence[Result]) -> str:
    """The table as a page of the documentation."""
    models = list(dict.fromkeys(result.model for result in results))
    right = [name for name in models if not any(r.problem for r in results if r.model == name)]
    lines = [
        "# Networks that are cut without an edit",
        "",
        f"{len(right)} of {len(models)} networks of torchvision {_release(torchvision)} are cut into 2 and 4 stages",
        f"with the outputs, gradients and buffers of the whole network (torch {_release(torch)}, float32, training and",
        "evaluation).",
        "This page is made by `python -m scripts.model_table --write`.",
        "",
        "*Tensors* is how many cross each cut; *imbalance* is the slowest stage's operations against the mean.",
        "",
        "| network | 2 stages: tensors | imbalance | 4 stages: tensors | imbalance | trace and cut, s | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in models:
        rows = [result for result in results if result.model == name]
        cells = [f"{', '.join(map(str, row.crossing))} | {row.imbalance:.2f}" for row in rows]
        problem = "; ".join(dict.fromkeys(row.problem for row in rows if row.problem)) or "right"
        lines.append(f"| {name} | {' | '.join(cells)} | {max(row.seconds for row in rows):.1f} | {problem} |")
    return "\n".join(lines) + "\n"


def _release(package: Any) -> str:
    return str(package.__version__.split("+")[0])


def main() -> None:
    """Check the networks and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=all_models())
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    results = []
    for name in arguments.models:
        for stages in STAGES:
            results.append(check(name, stages))
            print(results[-1], flush=True)
    if arguments.write:
        PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
