"""Parameters of one stage in flat units, of which each replica holds an equal part.

    unit, D = 2     [ conv.weight ............ | conv.bias | fc.weight .......... | fc.bias | pad ]
    replica 0       [ conv.weight ............ | conv.bias | fc. ]
    replica 1                                                    [ weight ....... | fc.bias | pad ]

A rank's *piece* of a parameter is what of it lies in the rank's part: one dimension, in the parameter's memory order,
perhaps empty. Optimizers that treat every element alike do on pieces what they do on the whole.
"""

import dataclasses
from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cnnpar._compat import all_gather_flat
from lightning_cnnpar.data_parallel.accumulation import NamedParameter


def owned_span(offset: int, numel: int, share: int, rank: int) -> tuple[int, int]:
    """Which elements of a parameter lie in the part of a rank.

    Args:
        offset: Where the parameter starts in the unit.
        numel: Its elements.
        share: Elements of each rank's part.
        rank: Index of the replica.

    Returns:
        First element and the one after the last, counted in the parameter; equal if there is none.
    """
    start = min(max(rank * share - offset, 0), numel)
    stop = min(max((rank + 1) * share - offset, 0), numel)
    return start, stop


@dataclasses.dataclass(eq=False, kw_only=True)
class Slot:
    """One parameter in a unit.

    Attributes:
        name: Dotted name in the LightningModule.
        parameter: The user's own parameter object. Its data is the whole, nothing or the piece, by phase.
        offset: Where it starts in the unit.
        shape: Of the whole.
        stride: Of the whole.
        span: Which of its elements are this rank's.
        piece: This rank's elements, part of the unit's shard.
        hollow: A tensor with the shape of the whole and the memory of one number, which is not a number.
        gradient: The piece of the gradient that waits for the optimizer.
        arrived: The piece of the gradient that the present backward pass has reduced.
        local: A whole gradient of this replica, put aside while the parameter is a piece.
        kept: Whether `gradient` is to be added to by what the present backward pass makes.
    """

    name: str
    parameter: nn.Parameter
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    span: tuple[int, int]
    piece: Tensor
    hollow: Tensor
    gradient: Tensor | None = None
    arrived: Tensor | None = None
    local: Tensor | None = None
    kept: bool = False

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return self.shape.numel()

    def view(self, flat: Tensor, offset: int | None = None) -> Tensor:
        """The parameter's part of a flat tensor of the whole unit, in the parameter's shape and memory format."""
        return flat.as_strided(self.shape, self.stride, self.offset if offset is None else offset)

    def flat(self, whole: Tensor) -> Tensor:
        """A whole tensor of the parameter's shape as one dimension, in the parameter's memory order."""
        flat = torch.empty(self.numel, dtype=whole.dtype, device=whole.device)
        self.view(flat, 0).copy_(whole)
        return flat


@final
class Unit:
    """Parameters that are gathered, reduced and cut together; all of one dtype on one device.

    Args:
        named: The parameters, whole, in the order of their places.
        group: The replicas, for sums.
        gather_group: The replicas, for gathering values. Another group, as ranks with other unused parameters do the
            one earlier or later than the other.
        rank: This replica.
        size: D.
        keeps_whole: Keep all values here; the parts of other replicas are updated by `gather_in_place`.

    Attributes:
        slots: One for each parameter.
        share: Elements of each rank's part.
        shard: This rank's part.
        whole: All values, where they are kept.
        version: How often an optimizer has stepped them.
    """

    def __init__(
        self,
        named: Sequence[NamedParameter],
        *,
        group: dist.ProcessGroup,
        gather_group: dist.ProcessGroup,
        rank: int,
        size: int,
        keeps_whole: bool,
    ) -> None:
        self.group, self.rank, self.size = group, rank, size
        self._gather_group = gather_group
        first = named[0][1]
        self.dtype, self.device = first.dtype, first.device
        self.num_elements = sum(parameter.numel() for _, parameter in named)
        self.share = -(-self.num_elements // size)
        flat = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        own = flat[rank * self.share : (rank + 1) * self.share]
        self.whole = flat if keeps_whole else None
        self.shard = own if keeps_whole else torch.empty_like(own)
        # Reading it is seen, writing it is refused; memory that is not there would end the process.
        nothing = torch.full((), float("nan"), dtype=self.dtype, device=self.device)
        slots, offset = [], 0
        for name, parameter in named:
            like = torch.empty_like(parameter.detach(), device="meta")
            start, stop = owned_span(offset, parameter.numel(), self.share, rank)
            begin = offset + start - rank * self.share
            slot = Slot(
                name=name,
                parameter=parameter,
                offset=offset,
                shape=parameter.shape,
                stride=like.stride(),
                span=(start, stop),
                # An empty piece has storage of its own, so that each piece can be told by its memory.
                piece=self.shard[begin : begin + stop - start] if stop > start else self.shard.new_empty(0),
                hollow=nothing.expand(parameter.shape),
            )
            slot.view(flat).copy_(parameter.detach())
            slots.append(slot)
            offset += parameter.numel()
        if not keeps_whole:
            self.shard.copy_(own)
        self.slots = tuple(slots)
        self.version = 0

    @property
    def numel(self) -> int:
        """Elements of the whole unit, with what fills it up to D equal parts."""
        return self.share * self.size

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole unit."""
        return self.numel * self.dtype.itemsize

    def new_whole(self) -> Tensor:
        """Memory for all values, filled with zeros at the end only."""
        flat = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        flat[self.num_elements :].zero_()
        return flat

    def gather(self, own: Tensor | None = None) -> Tensor:
        """All values, or those of a copy whose part is `own`, in new memory; a collective of the replicas."""
        own = self.shard if own is None else own
        flat = own.new_empty(self.numel)
        all_gather_flat(flat, own, self._gather_group)
        return flat

    def gather_in_place(self) -> None:
        """Update the parts of other replicas in `whole`; a collective of the replicas."""
        assert self.whole is not None
        all_gather_flat(self.whole, self.shard, self._gather_group)

    def own_part(self, flat: Tensor) -> Tensor:
        """This rank's part of a flat tensor of the whole unit."""
        return flat[self.rank * self.share : (self.rank + 1) * self.share]
