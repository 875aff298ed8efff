"""Gradients of several parameters side by side in one flat tensor, so that one collective reduces them all.

order of readiness   fc.bias fc.weight conv3.weight | conv2.weight conv1.weight
                     └───────── bucket 0 ─────────┘   └───────── bucket 1 ────┘
flat of bucket 0     [ fc.bias | fc.weight ......... | conv3.weight ........... ]
"""

import dataclasses
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cnnpar._compat import copy_tensors
from lightning_cnnpar.data_parallel.accumulation import NamedParameter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one parameter's gradient in a bucket.

    Attributes:
        position: Index of the parameter in the reducer's list.
        name: Dotted name, for messages and for state that hooks keep by parameter.
        parameter: The parameter.
        offset: Where its values start in the flat tensor, in elements of the flat tensor.
    """

    position: int
    name: str
    parameter: nn.Parameter
    offset: int


@final
class Bucket:
    """The gradients that one collective reduces, all of one dtype on one device.

    The gradients are copied into the flat tensor and back: what the user holds in `parameter.grad` stays the same
    tensor with the same strides, and stays local until the end of the pass. The flat tensor is kept between passes,
    since on a CPU the page faults of a new one cost more than both copies.

    Attributes:
        index: Position in the order of launches, the same on every rank.
        slots: One for each parameter.
        group: The ranks to average over.
        group_size: How many they are.
    """

    def __init__(
        self,
        index: int,
        members: Sequence[tuple[int, NamedParameter]],
        group: dist.ProcessGroup | None,
        group_size: int,
    ) -> None:
        self.index = index
        self.group = group
        self.group_size = group_size
        self.slots = tuple(_slots(members))
        self._numel = sum(real_numel(slot.parameter) for slot in self.slots)
        self._flat: Tensor | None = None
        self._parts: dict[int, Tensor] = {}
        self._packed: set[int] = set()

    @property
    def num_bytes(self) -> int:
        """Size of the flat tensor."""
        return self._numel * flat_kind(self.slots[0].parameter)[0].itemsize

    @property
    def flat(self) -> Tensor:
        """This rank's share of the means: its gradients divided by the size of the group; zeros for missing ones."""
        if self._flat is None:
            dtype, device = flat_kind(self.slots[0].parameter)
            self._flat = torch.empty(self._numel, dtype=dtype, device=device)
            self._parts = {slot.position: _part(self._flat, slot) for slot in self.slots}
        return self._flat

    def part(self, slot: Slot) -> Tensor:
        """The part of the flat tensor that belongs to `slot`, in the shape of its gradient."""
        _ = self.flat
        return self._parts[slot.position]

    @torch.no_grad()
    def pack_early(self, position: int) -> None:
        """Copy one gradient while it is still in the cache. On a device, few large copies are better."""
        slot = next(slot for slot in self.slots if slot.position == position)
        if slot.parameter.device.type == "cpu":
            self._copy_in(slot)
            self._packed.add(position)

    def unpack_early(self, position: int) -> None:
        """Forget about `pack_early`: the gradient has changed."""
        self._packed.discard(position)

    @torch.no_grad()
    def pack(self) -> None:
        """Fill what is still missing of the flat tensor."""
        left = [slot for slot in self.slots if slot.position not in self._packed]
        if self.flat.device.type == "cpu":
            for slot in left:
                self._copy_in(slot)
            return
        for slot in left:
            if slot.parameter.grad is None:
                self.part(slot).zero_()
        present = [(self.part(slot), slot.parameter.grad) for slot in left if slot.parameter.grad is not None]
        copy_tensors([part for part, _ in present], [real_view(grad) for _, grad in present])
        self.flat.div_(self.group_size)

    @torch.no_grad()
    def unpack(self, positions: Collection[int]) -> None:
        """Write the parts of the flat tensor into the gradients of the parameters at `positions`."""
        wanted = [slot for slot in self.slots if slot.position in positions]
        gradients = [real_view(writable_gradient(slot.parameter)) for slot in wanted]
        copy_tensors(gradients, [self.part(slot) for slot in wanted])
        self._packed.clear()

    def _copy_in(self, slot: Slot) -> None:
        part, grad = self.part(slot), slot.parameter.grad
        if grad is None:
            part.zero_()
        else:
            # Dividing before the sum, and not after it, keeps float16 gradients of many replicas from overflowing.
            torch.mul(real_view(grad), 1.0 / self.group_size, out=part)


def assign_buckets(
    order: Sequence[int], num_bytes: Sequence[int], kinds: Sequence[Hashable], *, first_limit: int, limit: int
) -> list[list[int]]:
    """Cut parameters into buckets.

    A bucket is closed as soon as it holds its limit. The first one of each kind is small, so that communication starts
    early. Buckets come in the order in which their last member is ready.

    Args:
        order: Positions of the parameters in the expected order of readiness.
        num_bytes: Gradient size by position.
        kinds: Only parameters of equal kind share a bucket; by position.
        first_limit: Size at which the first bucket of a kind is closed, in bytes.
        limit: Size at which the others are closed, in bytes.

    Returns:
        Positions by bucket.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    closed_kinds: set[Hashable] = set()
    for position in order:
        kind = kinds[position]
        open_buckets.setdefault(kind, []).append(position)
        filled[kind] = filled.get(kind, 0) + num_bytes[position]
        if filled[kind] >= (limit if kind in closed_kinds else first_limit):
            buckets.append(open_buckets.pop(kind))
            filled[kind] = 0
            closed_kinds.add(kind)
    buckets += open_buckets.values()
    rank = {position: index for index, position in enumerate(order)}
    return sorted(buckets, key=lambda bucket: rank[bucket[-1]])


def flat_kind(parameter: nn.Parameter) -> tuple[torch.dtype, torch.device]:
    """Dtype and device of the flat tensor that holds the parameter's gradient."""
    dtype: torch.dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    return (dtype.to_real() if dtype.is_complex else dtype), parameter.device


def gradient_bytes(parameter: nn.Parameter) -> int:
    """Size of the parameter's gradient in a bucket."""
    return real_numel(parameter) * flat_kind(parameter)[0].itemsize


def writable_gradient(parameter: nn.Parameter) -> Tensor:
    """The parameter's gradient; made in the parameter's memory format if there is none."""
    if parameter.grad is None:
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        parameter.grad = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return parameter.grad


def _slots(members: Sequence[tuple[int, NamedParameter]]) -> Iterator[Slot]:
    offset = 0
    for position, (name, parameter) in members:
        yield Slot(position=position, name=name, parameter=parameter, offset=offset)
        offset += real_numel(parameter)


def _part(flat: Tensor, slot: Slot) -> Tensor:
    # In the parameter's own strides, which autograd gives its gradient too: both copies then run along the memory.
    like = real_view(torch.empty_like(slot.parameter.detach(), device="meta"))
    return flat.as_strided(like.size(), like.stride(), slot.offset)


def real_view(tensor: Tensor) -> Tensor:
    """The tensor itself, or its real and imaginary parts: collectives and flat tensors hold real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def real_numel(parameter: nn.Parameter) -> int:
    """How many elements of a flat tensor the parameter's gradient takes."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)
