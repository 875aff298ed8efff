"""The gradients of a unit on their way: packed side by side, summed, and cut."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from lightning_cnnpar._compat import copy_tensors, reduce_scatter_flat
from lightning_cnnpar.data_parallel import buckets
from lightning_cnnpar.data_parallel.comm_hook import PendingWork, Reduction
from lightning_cnnpar.data_parallel.held_gradient import HeldGradient
from lightning_cnnpar.data_parallel.shards import Unit


@final
class UnitGradients:
    """The gradients of a unit on their way; what a `CommHook` sees as a bucket.

    Attributes:
        index: Of the unit, the same on every rank.
        slots: As buckets have them.
        flat: This rank's share of the means; zeros for missing gradients.
        own: This rank's part of the sums, once it has been reduced.
    """

    def __init__(self, index: int, unit: Unit, positions: Sequence[int], group_size: int) -> None:
        self.index = index
        self.group = unit.group
        self.group_size = group_size
        self.slots = tuple(
            buckets.Slot(position=position, name=slot.name, parameter=slot.parameter, offset=slot.offset)
            for position, slot in zip(positions, unit.slots, strict=True)
        )
        self._unit = unit
        self.flat = self._packed()
        self.own: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the flat tensor."""
        return self.flat.nbytes

    @property
    def unit(self) -> Unit:
        """Whose gradients these are."""
        return self._unit

    @torch.no_grad()
    def _packed(self) -> Tensor:
        unit = self._unit
        flat = unit.new_whole()
        present, targets = [], []
        for slot in unit.slots:
            grad = slot.parameter.grad
            if grad is None or isinstance(grad, HeldGradient):
                slot.view(flat).zero_()
                continue
            present.append(grad)
            targets.append(slot.view(flat))
            slot.parameter.grad = None
        copy_tensors(targets, present)
        # Dividing before the sum, and not after it, keeps float16 gradients of many replicas from overflowing.
        return flat.div_(self.group_size)


@final
class DenseReduceScatter:
    """Sums the gradients of a unit as they are."""

    def reduce(self, bucket: UnitGradients) -> Reduction:
        """Start one reduce-scatter."""
        bucket.own = torch.empty_like(bucket.unit.own_part(bucket.flat))
        work = reduce_scatter_flat(bucket.own, bucket.flat, bucket.group)
        return PendingWork(work, bucket.num_bytes)
