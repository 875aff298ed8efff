"""The place of a network call in the user's autograd graph.

To the loss, a network call is one node: outputs are its results, and its backward drains the pipeline.

    inputs that require a gradient ──┐
    anchor (there always is one) ────┴─► NetworkCall ─► outputs of the whole batch ─► the user's loss

Every rank of a replica computes the same loss from the same outputs, so each has the gradients of all outputs at hand
and none of them travels.
"""

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cnnpar.mesh import Mesh

Drain = Callable[[Sequence[Tensor | None], Tensor], list[Tensor | None]]
"""Takes the gradients of the outputs and the anchor; returns those of the inputs."""


class _NetworkCall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, drain: Drain, outputs: list[Tensor], differentiable: list[bool], anchor: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.drain, ctx.anchor = drain, anchor
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(out for out, wanted in zip(outputs, differentiable, strict=True) if not wanted))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return (None, None, None, None, *ctx.drain(gradients, ctx.anchor))


def attach(
    drain: Drain, outputs: list[Tensor], differentiable: list[bool], inputs: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The outputs as results of one node.

    Args:
        drain: The backward pass of the node.
        outputs: Outputs of the whole batch, without a graph.
        differentiable: Which of them depend on something that requires a gradient.
        inputs: Inputs of the network that require a gradient.
    """
    if not any(differentiable):
        return outputs
    # Parameters belong to the graphs of the stages. The anchor stands for them: it makes every rank take part, also one
    # whose own stages are frozen.
    anchor = torch.empty(0, requires_grad=True)
    return _NetworkCall.apply(drain, outputs, differentiable, anchor, *inputs)  # type: ignore[no-any-return]


def share_gradient(gradient: Tensor | None, like: Tensor, readers: Set[int], mesh: Mesh) -> Tensor | None:
    """The gradient of a network's input, on every rank of the replica.

    Args:
        gradient: What this rank's stages contribute.
        like: The input.
        readers: Pipeline ranks with a stage that reads the input.
        mesh: The grid.
    """
    if not readers:
        return None
    group = mesh.control_group if like.device.type == "cpu" else mesh.pipeline_group
    # Contiguous, whatever the layout of the input: ranks that hold no part must agree with those that do.
    total = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    if gradient is not None:
        total.copy_(gradient)
    if len(readers) == 1:
        dist.broadcast(total, mesh.global_rank(next(iter(readers))), group=group)
    else:
        dist.all_reduce(total, group=group)
    return total
