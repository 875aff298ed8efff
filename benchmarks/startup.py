"""What the first step of a large network costs beyond training: tracing, counting, cutting.

    python -m benchmarks.startup

Prints seconds for each network, and for residual networks of growing depth the seconds per block, which should not
grow.
"""

import argparse
import json
import time
import warnings

import torch
import torchvision
from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet

from lightning_cnnpar.partition.split import Partitioner

SIZES = {"resnet152": 128, "efficientnet_b7": 128}
DEPTHS = (8, 16, 32, 64)


def seconds_to_cut(network: nn.Module, size: int, stages: int) -> float:
    """Seconds to the first program of a network."""
    images = torch.randn(2, 3, size, size)
    begin = time.perf_counter()
    Partitioner(network, stages).program((images,), {})
    return time.perf_counter() - begin


def seconds_of_step(network: nn.Module, size: int) -> float:
    """Seconds of one forward and backward of two images."""
    images = torch.randn(2, 3, size, size)
    begin = time.perf_counter()
    network(images).sum().backward()
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print, one JSON object a line."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    warnings.simplefilter("ignore")
    for name, size in SIZES.items():
        network = torchvision.models.get_model(name, weights=None)
        cut = {stages: round(seconds_to_cut(network, size, stages), 2) for stages in (2, 4)}
        step = round(seconds_of_step(network, size), 2)
        print(json.dumps({"network": name, "seconds to cut, by stages": cut, "first step": step}), flush=True)
    for depth in DEPTHS:
        network = ResNet(Bottleneck, [2, 2, depth, 2])
        seconds = seconds_to_cut(network, 64, 4)
        print(
            json.dumps(
                {"blocks": depth + 6, "seconds": round(seconds, 2), "per block": round(seconds / (depth + 6), 4)}
            )
        )


if __name__ == "__main__":
    main()
