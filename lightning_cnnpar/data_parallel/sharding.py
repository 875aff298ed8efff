"""ZeRO: parameters, gradients and optimizer states of one stage, cut over the replicas that hold it.

                 forward and backward             optimizer's step             between steps
    stage 1, 2   parameter is whole               its piece, then gathered     whole
    stage 3      whole inside of its unit's use   its piece                    its piece

A parameter stays the same object all the time, so optimizers, parameter groups, freezing and schedulers need not know:
what changes is its data. `to_whole` and `to_pieces` switch all parameters of the stage at once. Pieces and their
gradients live in flat units (`shards.py`); who reduces gradients into them is `sharded_reducer.py`, who gathers units
for stage 3 is `gathering.py`.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cnnpar._compat import storage_key
from lightning_cnnpar.data_parallel.accumulation import NamedParameter, is_trainable_kind
from lightning_cnnpar.data_parallel.buckets import assign_buckets, flat_kind
from lightning_cnnpar.data_parallel.held_gradient import HeldGradient
from lightning_cnnpar.data_parallel.shards import Slot, Unit
from lightning_cnnpar.mesh import Mesh

# A unit holds at most this, and at least a sixteenth of the stage: few collectives, and little that is whole at a time.
LARGEST_UNIT = 25 * 2**20
SMALLEST_UNIT = 2**20
PARTS_OF_STAGE = 16


class ShardingError(RuntimeError):
    """Something that can't be cut over replicas."""


@contextlib.contextmanager
def _plain_mode() -> Iterator[None]:
    """Changes of parameters: never recorded, and never as inference tensors, which could not train any more."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@final
class Sharding:
    """The pieces of this rank.

    Args:
        stage: 1, 2 or 3.
        mesh: The grid; more than one replica.
        gather_group: The ranks that hold this rank's stage, for gathering values only.
    """

    def __init__(self, stage: int, mesh: Mesh, gather_group: dist.ProcessGroup) -> None:
        self.stage = stage
        self.units: list[Unit] = []
        self._mesh = mesh
        self._gather_group = gather_group
        self._slots: dict[int, Slot] = {}
        self._unit_of: dict[int, Unit] = {}
        # Pieces of copies of the module, such as weight averages: by copy, the parameter and its slot.
        self._copies: dict[int, list[tuple[nn.Parameter, Slot]]] = {}
        self._pieces: dict[tuple[int, int, int], tuple[Slot, Unit]] = {}
        self._is_whole = True
        self._is_restored = False
        self._handles: list[Any] = []

    @property
    def keeps_whole(self) -> bool:
        """Whether parameters are whole between steps."""
        return self.stage < 3

    @property
    def is_whole(self) -> bool:
        """Whether parameters have the shape that the network wants."""
        return self._is_whole

    @property
    def is_active(self) -> bool:
        """Whether there are pieces, and the run has not ended."""
        return bool(self.units) and not self._is_restored

    def slot(self, parameter: Any) -> Slot | None:
        """Where a parameter is; `None` for one that is not cut, or not here."""
        return self._slots.get(id(parameter))

    def unit_of(self, slot: Slot) -> Unit:
        """The unit that holds a slot."""
        return self._unit_of[id(slot)]

    # ---- cutting ---------------------------------------------------------------------------------------------------

    def add(self, groups: Sequence[Sequence[NamedParameter]]) -> None:
        """Cut more parameters.

        Args:
            groups: The parameters in the order in which they are used; those of a group are used together.

        Raises:
            ShardingError: For parameters that can't be cut.
        """
        groups = [[named for named in group if id(named[1]) not in self._slots] for group in groups]
        groups = [[named for named in group if is_trainable_kind(named[1])] for group in groups]
        _refuse_unusual([named for group in groups for named in group])
        pieces_now = not self._is_whole
        with _plain_mode():
            for members in _by_unit(groups):
                unit = Unit(
                    members,
                    group=self._mesh.data_group,  # type: ignore[arg-type]  # there is more than one replica
                    gather_group=self._gather_group,
                    rank=self._mesh.data_rank,
                    size=self._mesh.data_size,
                    keeps_whole=self.keeps_whole,
                )
                self.units.append(unit)
                for slot in unit.slots:
                    self._slots[id(slot.parameter)] = slot
                    self._unit_of[id(slot)] = unit
                    self._pieces[piece_key(slot.piece)] = slot, unit
                    slot.local, slot.parameter.grad = slot.parameter.grad, None
                    self._show_whole(unit, slot)
        if pieces_now:
            self._is_whole = True
            self.to_pieces()

    def add_copy(self, copy: nn.Module) -> None:
        """Cut a copy of the module that a callback keeps, like the module; only where parameters are pieces."""
        if self.keeps_whole:
            return
        by_name = {slot.name: slot for slot in self._slots.values()}
        known = self._copies.setdefault(id(copy), [])
        done = {id(parameter) for parameter, _ in known}
        with _plain_mode():
            for name, parameter in copy.named_parameters():
                slot = by_name.get(name)
                if slot is None or id(parameter) in done:
                    continue
                start, stop = slot.span
                piece = slot.flat(parameter.detach())[start:stop].clone()
                parameter.data = piece
                self._pieces[piece_key(piece)] = slot, self._unit_of[id(slot)]
                known.append((parameter, slot))

    def slice_states(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Keep this rank's pieces of optimizer states that are whole, such as those of a checkpoint."""
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                slot = self.slot(parameter)
                if slot is None:
                    continue
                for key, value in state.items():
                    if key != "step" and isinstance(value, Tensor) and value.shape == slot.shape:
                        start, stop = slot.span
                        state[key] = slot.flat(value)[start:stop].clone()

    # ---- phases ----------------------------------------------------------------------------------------------------

    def to_pieces(self) -> None:
        """Let every parameter, and its gradient, be this rank's piece of it."""
        if not self._is_whole or not self.is_active:
            return
        self._is_whole = False
        with _plain_mode():
            for slot in self._slots.values():
                self._take_replaced(slot)
                shown = slot.parameter.grad
                if not isinstance(shown, HeldGradient):
                    # Somebody zeroed it, or it is this replica's own and not reduced yet.
                    slot.gradient, slot.local = None, shown
                slot.parameter.grad = None
                slot.parameter.data = slot.piece
                slot.parameter.grad = slot.gradient

    def to_whole(self) -> None:
        """Let every parameter have the shape that the network wants; with stage 3, values come with `gathering`."""
        if self._is_whole or not self.is_active:
            return
        self._is_whole = True
        with _plain_mode():
            for unit in self.units:
                for slot in unit.slots:
                    slot.gradient, slot.parameter.grad = slot.parameter.grad, None
                    if slot.parameter.data_ptr() != slot.piece.data_ptr():
                        slot.piece.copy_(slot.parameter)
                    self._show_whole(unit, slot)
                    if slot.gradient is not None:
                        slot.parameter.grad = HeldGradient.of(slot)
                    elif slot.local is not None:
                        slot.parameter.grad, slot.local = slot.local, None

    def rest(self) -> None:
        """What parameters are between steps."""
        if self.keeps_whole:
            self.to_whole()
        else:
            self.to_pieces()

    def _take_replaced(self, slot: Slot) -> None:
        """Somebody may have given the parameter other memory: `parameter.data = values`."""
        whole = self._unit_of[id(slot)].whole
        if whole is not None:
            view = slot.view(whole)
            if slot.parameter.data_ptr() != view.data_ptr():
                view.copy_(slot.parameter)

    def _show_whole(self, unit: Unit, slot: Slot) -> None:
        slot.parameter.data = slot.hollow if unit.whole is None else slot.view(unit.whole)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def attach(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Give the optimizers pieces to step, and every replica what they made of them."""
        self.detach()
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(lambda *_: self.to_pieces()))
            self._handles.append(optimizer.register_step_post_hook(lambda stepped, *_: self._stepped(stepped)))

    def detach(self) -> None:
        """Let go of the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.is_active:
            return
        changed = {
            id(self._unit_of[id(slot)])
            for group in optimizer.param_groups
            for parameter in group["params"]
            if (slot := self.slot(parameter)) is not None
        }
        with _plain_mode():
            for unit in self.units:
                if id(unit) in changed:
                    unit.version += 1
                    if self.keeps_whole:
                        unit.gather_in_place()

    # ---- whole values ----------------------------------------------------------------------------------------------

    def piece_of(self, tensor: Tensor) -> tuple[Slot, Unit] | None:
        """Whose piece a tensor is, of the module's parameters or of a copy's."""
        if self.keeps_whole or not self.is_active:
            return None
        return self._pieces.get(piece_key(tensor))

    @contextlib.contextmanager
    def whole_values(self) -> Iterator[None]:
        """Parameters have all their values in this context; every replica enters it. Writes are lost with stage 3."""
        if not self.is_active:
            yield
            return
        was_whole = self._is_whole
        self.to_whole()
        try:
            if not self.keeps_whole:
                with _plain_mode():
                    for unit in self.units:
                        flat = unit.gather()
                        for slot in unit.slots:
                            slot.parameter.data = slot.view(flat)
            yield
        finally:
            if not self.keeps_whole:
                with _plain_mode():
                    for slot in self._slots.values():
                        slot.parameter.data = slot.hollow
            if not was_whole:
                self.to_pieces()

    def restore(self, *, gather: bool = True) -> None:
        """Make every parameter an ordinary one with all its values; the states of optimizers stay pieces.

        Args:
            gather: Bring values from other replicas; without, after an error, pieces stay where only they are left.
        """
        self.detach()
        if not self.is_active:
            return
        with _plain_mode():
            for unit in self.units:
                flat = unit.whole if unit.whole is not None else unit.gather() if gather else None
                if flat is None:
                    continue
                for slot in unit.slots:
                    slot.parameter.grad = None
                    slot.parameter.data = slot.view(flat).clone()
                    slot.gradient = slot.arrived = slot.local = None
                unit.whole = None
            if gather:
                for members in self._copies.values():
                    self._restore_copy(members)
        self._is_restored = True
        for unit in self.units:
            unit.whole = None
            unit.shard = unit.shard.new_empty(0)
            for slot in unit.slots:
                slot.piece = slot.piece.new_empty(0)
        self._copies.clear()
        self._pieces.clear()

    def _restore_copy(self, members: Sequence[tuple[nn.Parameter, Slot]]) -> None:
        pieces = {id(slot): parameter for parameter, slot in members}
        for unit in self.units:
            if not any(id(slot) in pieces for slot in unit.slots):
                continue
            # A copy may have another type than the module, and be on another device.
            like = next(pieces[id(slot)] for slot in unit.slots if id(slot) in pieces)
            own = torch.zeros(unit.share, dtype=like.dtype, device=unit.device)
            for slot in unit.slots:
                parameter = pieces.get(id(slot))
                if parameter is not None and parameter.numel():
                    begin = slot.offset + slot.span[0] - unit.rank * unit.share
                    own[begin : begin + parameter.numel()].copy_(parameter.detach())
            whole = unit.gather(own)
            for slot in unit.slots:
                if id(slot) in pieces:
                    pieces[id(slot)].data = slot.view(whole).clone().to(like.device)


def piece_key(tensor: Tensor) -> tuple[int, int, int]:
    """Equal for tensors that are the same piece: same memory, place and length."""
    return storage_key(tensor), int(tensor.storage_offset()), tensor.numel()


def _by_unit(groups: Sequence[Sequence[NamedParameter]]) -> list[list[NamedParameter]]:
    """Neighbouring groups together up to the size of a unit, the last used first: gradients come in that order."""
    order = [group for group in reversed(groups) if group]
    sizes = [sum(parameter.nbytes for _, parameter in group) for group in order]
    limit = min(LARGEST_UNIT, max(SMALLEST_UNIT, sum(sizes) // PARTS_OF_STAGE))
    buckets = assign_buckets(range(len(order)), sizes, [0] * len(order), first_limit=limit, limit=limit)
    units: list[list[NamedParameter]] = []
    for bucket in buckets:
        kinds: dict[Any, list[NamedParameter]] = {}
        for index in reversed(bucket):
            for named in order[index]:
                kinds.setdefault(flat_kind(named[1]), []).append(named)
        units += kinds.values()
    return units


def _refuse_unusual(named: Sequence[NamedParameter]) -> None:
    for name, parameter in named:
        if parameter.is_complex() or (getattr(parameter, "grad_dtype", None) or parameter.dtype) != parameter.dtype:
            raise ShardingError(
                f"{name!r} is {parameter.dtype} with gradients of another or a complex type, which zero_stage does not"
                " cut over replicas. Use zero_stage=0, or real parameters."
            )
