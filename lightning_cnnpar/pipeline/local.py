"""A program whose stages all run on this rank: microbatches in the user's own autograd graph, nothing detached."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cnnpar.partition.stage import Program
from lightning_cnnpar.pipeline.microbatch import split_leaf
from lightning_cnnpar.pipeline.outputs import check_joinable


def run_here(
    root: nn.Module,
    program: Program,
    leaves: Sequence[Any],
    batch_size: int,
    sizes: Sequence[int],
    begin: Callable[[int], None],
) -> list[Tensor]:
    """Run all stages of all microbatches and join the outputs.

    Raises:
        UnbatchedOutputError: If an output has no entry per sample.
    """
    cut = [split_leaf(leaf, batch_size, sizes) for leaf in leaves]
    parts: list[list[Tensor]] = [[] for _ in range(program.num_outputs)]
    for m in range(len(sizes)):
        values: dict[str, Tensor] = {}
        for stage in program.stages:
            begin(stage.index)
            inputs = [cut[index][m] for index in stage.inputs]
            sent, outputs = stage(root, inputs, [values[name] for name in stage.receives])
            values.update(zip(stage.sends, sent, strict=True))
            for number, output in zip(stage.outputs, outputs, strict=True):
                parts[number].append(output)
    if len(sizes) == 1:
        return [part for (part,) in parts]
    for number, tensors in enumerate(parts):
        check_joinable(number, [tensor.shape for tensor in tensors], sizes)
    return [torch.cat(tensors) for tensors in parts]
