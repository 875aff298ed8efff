"""How a batch crosses a replica: a small one in a single broadcast.

    frame    head | structure | states | small tensors      one buffer, usually one broadcast
    then     each large tensor by itself, straight from and into its own memory

The buffer's size follows the frame before; what doesn't fit comes in a second broadcast.
"""

import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cnnpar.mesh import Mesh
from lightning_cnnpar.mirror.packing import Packed, unpack

SMALL = 256 * 1024
"""Bytes up to which copying a tensor is cheaper than a broadcast of its own."""

_HEAD = struct.Struct("<6q")
_ALIGNMENT = 64
_MIN_CAPACITY, _MAX_CAPACITY = 4096, 1 << 20


@dataclass(frozen=True, kw_only=True)
class Label:
    """What a frame is: all ranks must be at the same point of the same loader.

    Attributes:
        kind: What it holds.
        loader: Number of the mirrored loader.
        step: How many frames of this epoch of the loader came before.
    """

    kind: int
    loader: int
    step: int


class Channel:
    """Frames from the first rank of a replica to the others, in the order in which it sends them."""

    def __init__(self, mesh: Mesh) -> None:
        assert mesh.control_group is not None
        # Not kept alive: the channel is found by its group and goes with it.
        self._group = weakref.ref(mesh.control_group)
        self._source = mesh.global_rank(0)
        self._capacity = _MIN_CAPACITY
        self._buffer = _byte_buffer(_MIN_CAPACITY)

    def send(self, label: Label, packed: Packed, states: bytes = b"") -> None:
        """Send a frame to all other ranks of the replica."""
        start = _aligned(_HEAD.size + len(packed.structure) + len(states))
        small = [content for content in packed.contents if content.numel() <= SMALL]
        total = start + sum(_aligned(content.numel()) for content in small)
        head = _HEAD.pack(label.kind, label.loader, label.step, len(packed.structure), len(states), total)
        buffer = self._room(total)
        text = head + packed.structure + states
        buffer.numpy()[: len(text)] = np.frombuffer(text, dtype=np.uint8)
        for content, (begin, end) in zip(small, _places(small, start), strict=True):
            buffer[begin:end].copy_(content)
        self._broadcast(buffer[: self._capacity])
        if total > self._capacity:
            self._broadcast(buffer[self._capacity : total])
        for content in packed.contents:
            if content.numel() > SMALL:
                self._broadcast(content)
        self._follow(total)

    def receive(self) -> tuple[Label, Any, bytes]:
        """The next frame: its label, what was packed, and the states."""
        self._broadcast(self._buffer[: self._capacity])
        head = self._buffer[: _HEAD.size].numpy().tobytes()
        kind, loader, step, structure_size, states_size, total = _HEAD.unpack(head)
        if total > self._capacity:
            self._broadcast(self._room(total)[self._capacity : total])
        buffer = self._buffer
        text = buffer[_HEAD.size : _HEAD.size + structure_size + states_size].numpy().tobytes()
        position = _aligned(_HEAD.size + len(text))

        def fill(content: Tensor) -> None:
            nonlocal position
            if content.numel() > SMALL:
                self._broadcast(content)
                return
            content.copy_(buffer[position : position + content.numel()])
            position += _aligned(content.numel())

        batch = unpack(text[:structure_size], fill)
        self._follow(total)
        return Label(kind=kind, loader=loader, step=step), batch, text[structure_size:]

    def _broadcast(self, content: Tensor) -> None:
        dist.broadcast(content, src=self._source, group=self._group())

    def _room(self, size: int) -> Tensor:
        if size > self._buffer.numel():
            grown = _byte_buffer(size)
            grown[: self._buffer.numel()] = self._buffer
            self._buffer = grown
        return self._buffer

    def _follow(self, total: int) -> None:
        # All ranks saw the same frames, so they agree on the size of the next one.
        wanted = min(1 << (total - 1).bit_length(), _MAX_CAPACITY)
        self._capacity = max(wanted, self._capacity // 2, _MIN_CAPACITY)
        if not self._capacity <= self._buffer.numel() <= 4 * max(total, self._capacity):
            self._buffer = _byte_buffer(self._capacity)


def _places(contents: list[Tensor], start: int) -> Iterator[tuple[int, int]]:
    for content in contents:
        yield start, start + content.numel()
        start += _aligned(content.numel())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _byte_buffer(size: int) -> Tensor:
    # The first batch may come in inference mode (a sanity check), later ones outside it.
    with torch.inference_mode(False):
        return torch.zeros(size, dtype=torch.uint8, device="cpu")
