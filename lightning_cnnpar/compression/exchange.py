"""How gradients of one bucket are summed over replicas: encoded on the encoder's thread, sent on the sender's.

    dense        all-reduce                                                                     here
    blockwise    encode N parts ─► all-to-all ─► decode, sum, encode ─► all-gather ─► decode    two_phase.py
    sparse       choose ─► all-gather ─► add up                                                 sparse.py
    low-rank     M Q ─► all-reduce ─► orthonormal P ─► Mᵀ P ─► all-reduce ─► P Qᵀ               low_rank.py

Every rank decodes the same bytes (its own as well), so all end with the same bits.
"""

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cnnpar.compression import swap
from lightning_cnnpar.compression.base import Compressor
from lightning_cnnpar.compression.residual import Residuals

# Of a payload: a power of two, and whether anything was not finite. Eight bytes, so that what follows is aligned.
HEADER = 8


@dataclasses.dataclass(frozen=True)
class Part:
    """One parameter's gradient.

    Attributes:
        name: Of the parameter.
        values: One dimension, in the parameter's memory order; becomes the sum over the group.
        shape: Of the parameter.
    """

    name: str
    values: Tensor
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the values as they are."""
        return self.values.numel() * self.values.element_size()


@dataclasses.dataclass(kw_only=True)
class Site:
    """What the exchanges of one rank share.

    Attributes:
        group: The ranks to sum over; used by one thread only.
        rank: Of this rank in it.
        size: N.
        residuals: Of this rank.
        momentum: Of the velocities that are summed in place of gradients; 0 for none.
        scale: The loss scale of the present step: residuals are kept without it.
        faults: For each exchange of the step whether something was not finite, on some rank.
        buffers: Memory that is kept between steps.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    residuals: Residuals
    momentum: float = 0.0
    scale: float = 1.0
    faults: list[Tensor] = dataclasses.field(default_factory=list)
    buffers: dict[Any, Tensor] = dataclasses.field(default_factory=dict)

    def buffer(self, key: Any, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of that size, with anything in it: on a CPU, new memory costs more than most passes over it."""
        found = self.buffers.get(key)
        if found is None or found.numel() != numel or found.dtype != dtype:
            found = self.buffers[key] = torch.empty(numel, dtype=dtype, device=device)
        return found


class Exchange(ABC):
    """The exchange of some parts of a bucket.

    Attributes:
        payload_bytes: What this rank gives to collectives.
        wire_bytes: What it sends, by the formula of the collective.
    """

    payload_bytes: int
    wire_bytes: float

    def __init__(self, site: Site, key: Any, parts: Sequence[Part]) -> None:
        self._site, self._key, self._parts = site, key, parts
        self._device = parts[0].values.device

    def _source(self, part: Part) -> Tensor:
        """What of a part is summed: its gradient, or its velocity, both with the loss scale."""
        site = self._site
        if not site.momentum:
            return part.values
        velocity = self._velocity(part)
        velocity.copy_(part.values).mul_(1.0 / site.scale)
        before = site.residuals.velocity.get(part.name)
        if before is not None:
            velocity.add_(before, alpha=site.momentum)
        site.residuals.propose_velocity(part.name, velocity)
        return velocity * site.scale

    def _velocity(self, part: Part) -> Tensor:
        dtype = torch.promote_types(part.values.dtype, torch.float32)
        return self._site.buffer(("velocity", part.name), part.values.numel(), dtype, self._device)

    @abstractmethod
    def encode(self) -> None:
        """All that needs no other rank."""

    @abstractmethod
    def send(self) -> None:
        """The collectives; afterwards the parts hold the sum."""


class Dense(Exchange):
    """As they are, with what an earlier compressor left out."""

    def __init__(self, site: Site, key: Any, parts: Sequence[Part]) -> None:
        super().__init__(site, key, parts)
        self.payload_bytes = sum(part.num_bytes for part in parts)
        self.wire_bytes = swap.ring_bytes(site.size, self.payload_bytes)

    def encode(self) -> None:
        """See `Exchange`."""
        self._joined = torch.cat([self._with_residual(part) for part in self._parts])

    def send(self) -> None:
        """See `Exchange`."""
        swap.all_reduce(self._joined, self._site.group)
        self._site.faults.append(~torch.isfinite(self._joined).all())
        sums = torch.split(self._joined, [part.values.numel() for part in self._parts])
        for part, values in zip(self._parts, sums, strict=True):
            part.values.copy_(values)

    def _with_residual(self, part: Part) -> Tensor:
        residuals, values = self._site.residuals, self._source(part)
        residuals.fold(part.name)
        if part.name in residuals.worker:
            values = values + residuals.worker[part.name] * self._site.scale
            residuals.propose_nothing_left(part.name)
        return values.to(part.values.dtype)


class Compressed(Exchange, ABC):
    """Gradients and residuals side by side in one float32 vector.

    Args:
        site: Of this rank.
        key: Under which its memory is kept.
        parts: What is exchanged.
        compressor: Whose options hold.
        sizes: Places that each part takes in the vector; its values come first.
    """

    def __init__(
        self, site: Site, key: Any, parts: Sequence[Part], compressor: Compressor, sizes: Sequence[int]
    ) -> None:
        super().__init__(site, key, parts)
        self._feedback = compressor.error_feedback
        *self._offsets, self._numel = itertools.accumulate(sizes, initial=0)

    def _memory(self, role: str, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._site.buffer((self._key, role), numel, dtype, self._device)

    def _segments(self, vector: Tensor) -> Iterator[tuple[Part, Tensor]]:
        """Each part and its values in a vector."""
        for part, offset in zip(self._parts, self._offsets, strict=True):
            yield part, vector[offset : offset + part.values.numel()]

    def _fill(self, values: Tensor) -> None:
        """Gradients plus residuals."""
        for part, segment in self._segments(values):
            segment.copy_(self._source(part))
            residual = self._site.residuals.worker.get(part.name)
            if self._feedback and residual is not None:
                segment.add_(residual, alpha=self._site.scale)

    def _propose(self, left: Tensor) -> None:
        if not self._feedback:
            return
        left.mul_(1.0 / self._site.scale)
        for part, segment in self._segments(left):
            self._site.residuals.propose_worker(part.name, segment)

    def _hand_out(self, sums: Tensor, fault: Tensor) -> None:
        """Write the sums into the parts: NaN where some rank's gradients were not finite, as plain sums would be."""
        self._site.faults.append(fault)
        sums.add_(torch.where(fault, torch.nan, 0.0))
        for part, segment in self._segments(sums):
            part.values.copy_(segment)
