"""Tensors on the wire: what a receiver must know of one, and its memory as a flat block.

    sender      any tensor ─► dense (channels_last stays) ─► flat view of its memory ─► wire
    receiver    wire ─► flat view of an empty tensor with the same strides ─► leaf

Dense tensors of any memory format are sent without a copy and come out with the strides they had.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Meta:
    """What a receiver must know of a tensor.

    Attributes:
        shape: Its shape.
        strides: Strides of a dense layout; `None` for the contiguous one.
        dtype: Its type in the network; on the wire it may be narrower.
        device: Kind of device. Small tensors of indices may stay on the CPU.
        requires_grad: Whether a gradient comes back for it.
    """

    shape: Shape
    strides: Shape | None
    dtype: torch.dtype
    device: str
    requires_grad: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size in its own type."""
        return self.numel * self.dtype.itemsize


def describe(tensor: Tensor) -> Meta:
    """The description of a tensor, in the layout in which it is sent."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    if not _is_dense(tensor):
        strides = dense_strides(shape, strides)
    layout = None if strides == contiguous_strides(shape) else strides
    return Meta(shape, layout, tensor.dtype, tensor.device.type, tensor.requires_grad)


def contiguous_strides(shape: Sequence[int]) -> Shape:
    """Strides of a contiguous tensor."""
    return dense_strides(shape, range(len(shape), 0, -1))


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> Shape:
    """Strides of a dense tensor whose dimensions lie in memory in the order of `strides`.

    Slices of a channels_last tensor give channels_last, expanded tensors are written out.
    """
    dense, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim)):
        dense[dim] = step
        step *= max(shape[dim], 1)
    return tuple(dense)


def _is_dense(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d)


def flat(tensor: Tensor, meta: Meta, dtype: torch.dtype | None = None) -> Tensor:
    """The elements of a tensor in the memory order of `meta`, without a copy where it is laid out like that.

    Args:
        tensor: A tensor of the shape of `meta`.
        meta: The layout that is wanted.
        dtype: Type on the wire; the tensor's own if left out.
    """
    tensor = tensor.detach()
    strides = meta.strides
    if strides is None:
        tensor = tensor.contiguous()
    elif tensor.stride() != strides:
        tensor = torch.empty_strided(meta.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    if dtype is not None and dtype != tensor.dtype:
        tensor = tensor.to(dtype)
    return tensor.as_strided((tensor.numel(),), (1,))


def is_cut_along_first(meta: Meta) -> bool:
    """Whether slices of dimension 0 of such tensors lie behind each other in memory."""
    return meta.strides is None or meta.strides[0] == meta.numel // max(meta.shape[0], 1)


def resized(meta: Meta, samples: int) -> Meta:
    """The description with another dimension 0."""
    shape = (samples, *meta.shape[1:])
    strides = None if meta.strides is None else dense_strides(shape, meta.strides)
    return dataclasses.replace(meta, shape=shape, strides=strides)


def empty(meta: Meta, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """An empty tensor with the layout of `meta`, and its memory as a flat block to receive into.

    Args:
        meta: What is going to arrive.
        dtype: Type on the wire.
        device: Where stages compute.
    """
    device = torch.device("cpu") if meta.device == "cpu" else device
    # The block is the view, not the tensor: users may change outputs in place, which autograd refuses for views.
    strides = contiguous_strides(meta.shape) if meta.strides is None else meta.strides
    tensor = torch.empty_strided(meta.shape, strides, dtype=dtype, device=device)
    return tensor, tensor.as_strided((meta.numel,), (1,))
