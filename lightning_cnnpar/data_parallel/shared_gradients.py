"""Gradients that belong to the whole world rather than to one stage.

Two kinds, here for D = 2, P = 2 (a row is a replica):

    averaged   [g0] [g0]      outside the network: every rank of a replica computes the whole gradient
               [g1] [g1]      → (2 g0 + 2 g1) / 4 everywhere; the copies stay equal bit by bit
    summed     [a0] [b0]      tied between stages: every stage computes a part of it
               [a1] [b1]      → (a0 + b0 + a1 + b1) / 2 everywhere

They are few and small, so they are reduced in one piece after the stage's buckets.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_cnnpar.data_parallel.accumulation import (
    NamedParameter,
    after_accumulation,
    before_accumulation,
    is_trainable_kind,
)
from lightning_cnnpar.data_parallel.buckets import flat_kind, real_numel, real_view, writable_gradient
from lightning_cnnpar.mesh import Mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Flat:
    """Gradients of one dtype under way."""

    positions: list[int]
    tensor: Tensor
    work: dist.Work


@final
class SharedGradients:
    """Keeps the gradients of `averaged` and `summed` parameters equal on all ranks of the world.

    Both lists hold the same names in the same order on every rank; a rank that doesn't hold one lists its placeholder
    on `meta`, and takes part with zeros.
    """

    def __init__(self, averaged: Sequence[NamedParameter], summed: Sequence[NamedParameter], mesh: Mesh) -> None:
        self._named = [*averaged, *summed]
        self._num_averaged = len(averaged)
        self._mesh = mesh
        self._held = [is_trainable_kind(parameter) for _, parameter in self._named]
        self._touched = bytearray(len(self._named))
        self._owners: list[int | None] = [None] * len(self._named)
        self._under_way: list[_Flat] = []

    def __len__(self) -> int:
        return len(self._named)

    def register(self, accumulated: Callable[[], None]) -> Iterable[RemovableHandle]:
        """Watch the parameters; `accumulated` is called after each change of a gradient."""

        def after(position: int) -> Callable[[], None]:
            def callback() -> None:
                self._touched[position] = 1
                accumulated()

            return callback

        for position, named in enumerate(self._named):
            if not self._held[position]:
                continue
            yield after_accumulation(named, after(position))
            if self._is_summed(position):
                yield before_accumulation(named, lambda position=position: self._before(position))  # type: ignore[misc]

    def flags(self) -> bytes:
        """What the ranks of the world have to agree on, by maximum: which were touched, and by whom they are owned."""
        first = self._mesh.pipeline_size - self._mesh.pipeline_rank
        return bytes(self._touched) + bytes(first if held else 0 for held in self._held)

    def touched(self, agreed: Sequence[int]) -> list[str]:
        """Names of the parameters that got a gradient on some rank."""
        return [name for position, (name, _) in enumerate(self._named) if agreed[position]]

    def start(self, agreed: Sequence[int]) -> int:
        """Start reducing what any rank touched.

        Args:
            agreed: The maximum over the world of `flags()`.

        Returns:
            Bytes given to collectives.
        """
        self._owners = [self._mesh.pipeline_size - code if code else None for code in agreed[len(self) :]]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for position in (position for position in range(len(self)) if agreed[position]):
            by_dtype.setdefault(flat_kind(self._named[position][1])[0], []).append(position)
        self._under_way = [self._start(positions) for positions in by_dtype.values()]
        return sum(flat.tensor.nbytes for flat in self._under_way)

    def finish(self) -> None:
        """Wait for what `start` began, and write it into the gradients."""
        for flat in self._under_way:
            flat.work.wait()
            self._write_back(flat)
            for position in flat.positions:
                self._touched[position] = 0
        self._under_way = []

    def _is_summed(self, position: int) -> bool:
        return position >= self._num_averaged

    def _is_owner(self, position: int) -> bool:
        return self._owners[position] in (None, self._mesh.pipeline_rank)

    def _before(self, position: int) -> None:
        # A gradient that is still there from an earlier round is a whole one on every holder. It must count once in the
        # next sum, so only the owner keeps it while the new parts are added.
        grad = self._named[position][1].grad
        if grad is not None and not self._touched[position] and not self._is_owner(position):
            with torch.no_grad():
                grad.zero_()

    @torch.no_grad()
    def _start(self, positions: list[int]) -> _Flat:
        flat = torch.cat([self._contribution(position) for position in positions])
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        return _Flat(positions=positions, tensor=flat, work=work)

    def _contribution(self, position: int) -> Tensor:
        parameter = self._named[position][1]
        grad = parameter.grad if self._held[position] else None
        if grad is not None and self._is_summed(position) and not self._touched[position]:
            grad = grad if self._is_owner(position) else None
        if grad is None:
            dtype, _ = flat_kind(parameter)
            return torch.zeros(real_numel(parameter), dtype=dtype, device=self._device())
        copies = self._mesh.data_size if self._is_summed(position) else self._mesh.world_size
        return (real_view(grad) / copies).reshape(-1).to(self._device())

    @torch.no_grad()
    def _write_back(self, flat: _Flat) -> None:
        offset = 0
        for position in flat.positions:
            parameter = self._named[position][1]
            numel = real_numel(parameter)
            values = flat.tensor.narrow(0, offset, numel)
            offset += numel
            if self._held[position]:
                grad = writable_gradient(parameter)
                real = real_view(grad)
                real.copy_(values.view(real.shape))

    def _device(self) -> torch.device:
        held = (parameter.device for (_, parameter), held in zip(self._named, self._held, strict=True) if held)
        fallback = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        return next(held, fallback)
