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

    The gradients are copied into the flat tensor, and stay as they are until the end of the pass. Then those that were
    there before the pass are written in place, as autograd does, so that they stay the same tensors. Those that are new
    are replaced by their parts of the flat tensor, which saves a pass over the memory; the next pass gets a new flat
    tensor, so nobody ever writes into them again. Strides are those that autograd gives in either case.

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
        self._views: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Size of the flat tensor."""
        return self._numel * flat_kind(self.slots[0].parameter)[0].itemsize

    @property
    def flat(self) -> Tensor:
        """The flat tensor of this pass: `pack` fills it, and a reduction leaves its result in it."""
        if self._flat is None:
            dtype, device = flat_kind(self.slots[0].parameter)
            self._flat = torch.empty(self._numel, dtype=dtype, device=device)
        return self._flat

    @property
    def parts(self) -> list[tuple[Slot, Tensor]]:
        """Each parameter's part of the flat tensor, in the shape of its gradient."""
        return [(slot, _part(self.flat, slot)) for slot in self.slots]

    @torch.no_grad()
    def pack(self, scale: float = 1.0) -> Tensor:
        """Fill the flat tensor with this rank's gradients times `scale`; a missing gradient counts as zero.

        Scaling before the sum, and not after it, keeps float16 gradients of many replicas from overflowing.
        """
        flat = self.flat
        present: list[tuple[Tensor, Tensor]] = []
        for slot, part in self.parts:
            if slot.parameter.grad is None:
                part.zero_()
            else:
                present.append((part, real_view(slot.parameter.grad)))
        if flat.device.type == "cpu" and scale != 1.0:
            for part, grad in present:  # one pass over the memory instead of two
                torch.mul(grad, scale, out=part)
            return flat
        copy_tensors([part for part, _ in present], [grad for _, grad in present])
        return flat if scale == 1.0 else flat.mul_(scale)

    @torch.no_grad()
    def unpack(self, positions: Collection[int], new: Collection[int] = ()) -> None:
        """Make the parts of the flat tensor the gradients of the parameters at `positions`, and let go of it.

        Args:
            positions: Whose gradients are wanted.
            new: Whose gradients were not there before the pass.
        """
        wanted = [(slot, part) for slot, part in self.parts if slot.position in positions]
        adopted = [(slot, part) for slot, part in wanted if slot.position in new and not slot.parameter.is_complex()]
        if 2 * sum(part.numel() for _, part in adopted) < self._numel:
            adopted = []  # a small part would keep the whole flat tensor alive
        for slot, part in adopted:
            slot.parameter.grad = part
        others = [(slot, part) for slot, part in wanted if slot.parameter.grad is not part]
        copy_tensors([real_view(writable_gradient(slot.parameter)) for slot, _ in others], [part for _, part in others])
        self._flat = None


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
    # In the parameter's own strides, which autograd gives its gradient too: both copies then run along the memory. Not as
    # a view, which the user could not detach in place.
    like = real_view(torch.empty_like(slot.parameter.detach(), device="meta"))
    part = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return part.set_(flat.untyped_storage(), slot.offset, like.size(), like.stride())


def real_view(tensor: Tensor) -> Tensor:
    """The tensor itself, or its real and imaginary parts: collectives and flat tensors hold real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def real_numel(parameter: nn.Parameter) -> int:
    """How many elements of a flat tensor the parameter's gradient takes."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)
