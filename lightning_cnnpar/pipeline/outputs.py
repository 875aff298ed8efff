"""The outputs of a network, joined from microbatches.

    large output    each microbatch leaves as soon as it is made and arrives where it belongs in the whole batch
    small output    joined first, sent once: for a few class scores the messages would cost more than the wait

Only tensors with one entry per sample in dimension 0 can be joined. Others (a loss, a sum over the batch) show when
they come out, on all ranks alike, and the batch then runs whole.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_cnnpar.pipeline import wire
from lightning_cnnpar.pipeline.microbatch import offsets
from lightning_cnnpar.pipeline.wire import Meta

# A message between two processes costs as much as copying about this many bytes.
_SMALL = 64 * 1024


class UnbatchedOutputError(Exception):
    """An output has no entry per sample. For the caller within this package: run the batch whole."""


class JoinedOutputs:
    """Collects the outputs of one call.

    Args:
        num_outputs: How many output tensors the network has.
        sizes: Samples in each microbatch.
        device: Where stages compute.
    """

    def __init__(self, num_outputs: int, sizes: Sequence[int], device: torch.device) -> None:
        self._sizes, self._offsets, self._device = sizes, offsets(sizes), device
        self._metas: list[list[Meta]] = [[] for _ in range(num_outputs)]
        self._parts: list[list[Tensor]] = [[] for _ in range(num_outputs)]
        self._whole: dict[int, Tensor] = {}

    def describe(self, number: int, meta: Meta) -> None:
        """Take in the description of an output of the next microbatch."""
        self._metas[number].append(meta)

    def is_late(self, number: int) -> bool:
        """Whether an output is sent joined. Every rank decides alike, from the first microbatch."""
        return len(self._sizes) > 1 and self._metas[number][0].num_bytes <= _SMALL

    def expect(self, number: int, microbatch: int, meta: Meta) -> tuple[Tensor, Tensor] | None:
        """Take in a description, and say where that output from another rank should arrive.

        Returns:
            The tensor, and its memory as a flat block; `None` if the output comes later, joined.
        """
        self.describe(number, meta)
        return None if self.is_late(number) else self._place(number, microbatch, meta)

    def _place(self, number: int, microbatch: int, meta: Meta) -> tuple[Tensor, Tensor]:
        size = self._sizes[microbatch]
        if len(self._sizes) == 1 or not _is_joinable(meta.shape, size) or not wire.is_cut_along_first(meta):
            return wire.empty(meta, meta.dtype, self._device)
        if number not in self._whole:
            self._whole[number] = wire.empty(wire.resized(meta, sum(self._sizes)), meta.dtype, self._device)[0]
        whole = self._whole[number]
        part = whole.narrow(0, self._offsets[microbatch], size)
        if part.shape != meta.shape or part.dtype != meta.dtype or wire.describe(part).strides != meta.strides:
            return wire.empty(meta, meta.dtype, self._device)
        return part, part.as_strided((part.numel(),), (1,))

    def add(self, number: int, tensor: Tensor) -> None:
        """Take in an output of the next microbatch."""
        self._parts[number].append(tensor.detach())

    def late_meta(self, number: int) -> Meta:
        """Description of a late output as it is sent."""
        return wire.resized(self._metas[number][0], sum(self._sizes))

    def set_whole(self, number: int, tensor: Tensor) -> None:
        """Take in a late output."""
        self._parts[number] = [tensor]

    def check(self) -> None:
        """Refuse outputs that can't be joined. All ranks have seen all descriptions, so all do.

        Raises:
            UnbatchedOutputError: With the shape that was seen.
        """
        if len(self._sizes) > 1:
            for number, metas in enumerate(self._metas):
                check_joinable(number, [meta.shape for meta in metas], self._sizes)

    def join(self, number: int) -> Tensor:
        """An output of the whole batch."""
        parts, whole = self._parts[number], self._whole.get(number)
        if len(parts) == 1:
            return parts[0]
        return whole if whole is not None and all(_is_inside(part, whole) for part in parts) else torch.cat(parts)

    def take(self) -> list[Tensor]:
        """All outputs of the whole batch. They are the caller's then: nothing here refers to them any more."""
        joined = [self.join(number) for number in range(len(self._parts))]
        self._parts, self._whole = [], {}
        return joined

    def requires_grad(self) -> list[bool]:
        """Which outputs the loss may differentiate."""
        return [any(meta.requires_grad for meta in metas) for metas in self._metas]


def check_joinable(number: int, shapes: Sequence[Sequence[int]], sizes: Sequence[int]) -> None:
    """Refuse to join tensors that don't have one entry per sample.

    Raises:
        UnbatchedOutputError: With the shape that was seen.
    """
    for shape, size in zip(shapes, sizes, strict=True):
        if not _is_joinable(shape, size):
            raise UnbatchedOutputError(f"output {number} has shape {tuple(shape)} for a microbatch of {size} samples")


def _is_joinable(shape: Sequence[int], size: int) -> bool:
    return len(shape) > 0 and shape[0] == size


def _is_inside(part: Tensor, whole: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
