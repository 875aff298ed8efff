"""Stage 3 of ZeRO: a unit's values exist while the network uses them.

    forward of a stage     conv1 ─► block1 ─► block2 ─► fc      units A = {conv1, block1}, B = {block2, fc}
    units                  A        ·         A gone, B  ·  B gone
    its backward                    A ◄─────────── B            each once more, in the reverse order

Forward: hooks on the submodules that a stage calls gather what comes next; the order is that of the calls, which the
traced program fixes, so it is the same on all replicas. Backward: autograd does not keep the weights. It keeps which
unit they are of, and asks for them when it needs them. Units are then gathered in the reverse of the forward's order,
also those that this replica's graph happens not to need, since other replicas may.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from lightning_cnnpar._compat import in_backward, queue_backward_callback, saved_tensors_are_hooked, storage_key
from lightning_cnnpar.data_parallel.sharding import Sharding, ShardingError
from lightning_cnnpar.data_parallel.shards import Unit
from lightning_cnnpar.partition.stage import Program, Stage

_TELLS_NO_VALUES = frozenset(
    {
        *(
            "__get__",
            "__set__",
            "requires_grad_",
            "dim",
            "size",
            "numel",
            "nelement",
            "stride",
            "data_ptr",
            "element_size",
        ),
        *("is_complex", "is_floating_point", "is_contiguous", "__len__", "__repr__", "ndimension", "register_hook"),
        *(
            "detach",
            "untyped_storage",
            "storage_offset",
            "__hash__",
            "__deepcopy__",
            "register_post_accumulate_grad_hook",
        ),
    }
)


@dataclasses.dataclass(eq=False)
class _Graph:
    """One forward of a stage, and the units that its backward needs.

    Attributes:
        order: Units as the forward gathered them.
        packed: How many saved tensors are still to be asked for, by unit.
        plan: What the backward gathers, in order.
        done: How many of those it has gathered.
    """

    order: list[Unit] = dataclasses.field(default_factory=list)
    packed: Counter[int] = dataclasses.field(default_factory=Counter)
    plan: list[Unit] | None = None
    done: int = 0


@dataclasses.dataclass(frozen=True)
class _Packed:
    """In place of a saved weight."""

    graph: _Graph
    unit: Unit
    version: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@final
class Gathering:
    """Gathers units when they are used, and lets them go.

    Args:
        sharding: The units.

    Attributes:
        peak_bytes: Most bytes of gathered units at a time, so far.
    """

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._resident: dict[int, tuple[Unit, Tensor]] = {}
        self._by_storage: dict[int, Unit] = {}
        self._in_use: Counter[int] = Counter()
        self._forward: _Graph | None = None
        self._backward: _Graph | None = None
        self._hooked: dict[int, tuple[Any, ...]] = {}
        self._hooked_again: dict[int, tuple[Any, ...]] = {}
        self._programs: dict[int, tuple[Program, Program]] = {}
        self._is_tracing = False
        self.peak_bytes = 0

    # ---- what runs -------------------------------------------------------------------------------------------------

    def around(self, root: nn.Module, program: Program) -> Program:
        """The same program, with units gathered while its stages run here."""
        known = self._programs.get(id(program))
        if known is None:
            stages = tuple(dataclasses.replace(s, function=self._stage_function(root, s)) for s in program.stages)
            known = self._programs[id(program)] = program, dataclasses.replace(program, stages=stages)
        return known[1]

    def _stage_function(self, root: nn.Module, stage: Stage) -> Any:
        function, modules = stage.function, stage.modules

        @functools.wraps(function)
        def run(*args: Any) -> Any:
            called = [root.get_submodule(name) for name in modules]
            with self.running(called, root):
                return function(*args)

        return run

    @contextlib.contextmanager
    def running(self, called: Sequence[nn.Module], root: nn.Module | None = None) -> Iterator[None]:
        """Code inside runs these submodules, and perhaps reads parameters of `root` that none of them has."""
        if not self._sharding.is_active:
            yield
            return
        self._sharding.to_whole()
        self._release(all_of_them=True)
        before, self._forward = self._forward, _Graph()
        self._hook(called)
        if root is not None:
            self._hook_again(root)
        covered = {id(parameter) for module in called for parameter in module.parameters()}
        # What is read as an attribute is there from the beginning to the end.
        around = self._units_of(
            parameter for parameter in (root.parameters() if root is not None else ()) if id(parameter) not in covered
        )
        hooks: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if torch.is_grad_enabled() and not saved_tensors_are_hooked():
            hooks = saved_tensors_hooks(self._pack, self._unpack)
        try:
            self._use(around)
            with hooks:
                yield
        finally:
            self._in_use.clear()
            self._release(all_of_them=True)
            self._forward = before

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        """Code inside gets an error when it reads a parameter whose values are not here."""
        return _Watch(self._refuse)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Code inside looks at shapes and types only."""
        before, self._is_tracing = self._is_tracing, True
        try:
            yield
        finally:
            self._is_tracing = before

    def _refuse(self, value: Any, name: str) -> None:
        slot = self._sharding.slot(value)
        if (
            self._is_tracing
            or slot is None
            or not self._sharding.is_whole
            or id(self._sharding.unit_of(slot)) in self._resident
        ):
            return
        if value.data_ptr() != slot.hollow.data_ptr():
            return  # its unit is here
        raise ShardingError(
            f"{slot.name!r} was read by `{name}` outside of the network's own forward, and with zero_stage=3 its values"
            " are only there inside of it. Compute such terms inside the network's forward, use the optimizer's"
            " `weight_decay` for an L2 penalty, `with trainer.strategy.whole_module():` to read weights, or"
            " zero_stage=2."
        )

    @contextlib.contextmanager
    def using(self, module: nn.Module) -> Iterator[None]:
        """Code inside runs a module in any way: all of its parameters are there all the time."""
        with self.running((), module):
            yield

    def forget(self) -> None:
        """The run has ended."""
        for *handles, _ in (*self._hooked.values(), *self._hooked_again.values()):
            for handle in handles:
                handle.remove()
        self._hooked.clear()
        self._hooked_again.clear()
        self._programs.clear()

    # ---- forward ---------------------------------------------------------------------------------------------------

    def _hook(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            for part in _parts(module):
                if id(part) not in self._hooked and any(True for _ in part.parameters()):
                    before = part.register_forward_pre_hook(self._enter, prepend=True)
                    after = part.register_forward_hook(self._leave, always_call=True)
                    self._hooked[id(part)] = before, after, part

    def _hook_again(self, root: nn.Module) -> None:
        for module in root.modules():
            if id(module) not in self._hooked_again:
                again = module.register_forward_pre_hook(self._enter_again, prepend=True)
                self._hooked_again[id(module)] = again, module

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._forward is not None:
            self._use(self._units_of(module.parameters()))

    def _enter_again(self, module: nn.Module, args: Any) -> None:
        """Activations that the user's own checkpointing computes again: it calls any submodule."""
        if self._forward is not None or not self._sharding.is_active or not in_backward():
            return
        wanted = self._units_of(module.parameters())
        for unit, _ in list(self._resident.values()):
            # What was computed again from it keeps its memory for as long as it is needed.
            if unit not in wanted and (self._backward is None or self._backward.packed[id(unit)] <= 0):
                self._drop(unit)
        for unit in wanted:
            if self._backward is not None:
                self._need_again(self._backward, unit)
            elif id(unit) not in self._resident:
                self._gather(unit)
                queue_backward_callback(self._finish_backward)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._forward is not None:
            for unit in self._units_of(module.parameters()):
                self._in_use[id(unit)] -= 1

    def _units_of(self, parameters: Iterable[nn.Parameter]) -> list[Unit]:
        found: dict[int, Unit] = {}
        for parameter in parameters:
            slot = self._sharding.slot(parameter)
            if slot is not None:
                unit = self._sharding.unit_of(slot)
                found[id(unit)] = unit
        return list(found.values())

    def _use(self, units: Sequence[Unit]) -> None:
        assert self._forward is not None
        for unit in units:
            self._in_use[id(unit)] += 1
        for unit in units:
            if id(unit) not in self._resident:
                self._release()
                self._gather(unit)
                self._forward.order.append(unit)

    # ---- backward --------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Tensor | _Packed:
        unit = self._by_storage.get(storage_key(tensor))
        graph = self._forward
        if unit is None or graph is None:
            return tensor
        graph.packed[id(unit)] += 1
        return _Packed(graph, unit, unit.version, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, packed: Tensor | _Packed) -> Tensor:
        if not isinstance(packed, _Packed):
            return packed
        graph, unit = packed.graph, packed.unit
        if packed.version != unit.version:
            raise ShardingError(
                "A backward pass needs parameters as they were before the last optimizer step, and with zero_stage=3"
                " those are gone: run it before the step, or use zero_stage=2."
            )
        flat = self._need_again(graph, unit)
        with torch.no_grad():
            tensor = flat.as_strided(packed.shape, packed.stride, packed.offset)
        graph.packed[id(unit)] -= 1
        if not graph.packed[id(unit)]:
            # The tensor keeps its memory until the operation that asked for it is done.
            self._drop(unit)
        return tensor

    def _need_again(self, graph: _Graph, unit: Unit) -> Tensor:
        if self._backward is not graph:
            self._finish_backward()
            self._begin_backward(graph)
        assert graph.plan is not None
        if unit in graph.plan[graph.done :]:
            through = graph.plan.index(unit, graph.done) + 1
            for following in graph.plan[graph.done : through]:
                if id(following) not in self._resident:
                    self._gather(following)
            graph.done = through
        elif id(unit) not in self._resident:
            self._gather(unit)
        return self._resident[id(unit)][1]

    def _begin_backward(self, graph: _Graph) -> None:
        self._backward = graph
        if graph.plan is None:
            last = list({id(unit): unit for unit in reversed(graph.order)}.values())
            # Frozen units below the first trainable one are not needed, unless gradients go on to an earlier stage.
            graph.plan = [unit for unit in last if graph.packed[id(unit)] or _is_trainable(unit)]
        graph.done = 0
        queue_backward_callback(self._finish_backward)

    def _finish_backward(self) -> None:
        graph, self._backward = self._backward, None
        if graph is None:
            self._release(all_of_them=True)
            return
        assert graph.plan is not None
        for unit in graph.plan[graph.done :]:
            if id(unit) not in self._resident:
                self._gather(unit)
                self._drop(unit)
        graph.done = len(graph.plan)
        self._release(all_of_them=True)

    # ---- units -----------------------------------------------------------------------------------------------------

    def _gather(self, unit: Unit) -> None:
        with torch.inference_mode(False), torch.no_grad():
            flat = unit.gather()
            # Where the backward pass has ended already for the gradients, parameters are pieces.
            for slot in unit.slots if self._sharding.is_whole else ():
                slot.parameter.data = slot.view(flat)
        self._resident[id(unit)] = unit, flat
        self._by_storage[storage_key(flat)] = unit
        self.peak_bytes = max(self.peak_bytes, sum(held.nbytes for _, held in self._resident.values()))

    def _release(self, *, all_of_them: bool = False) -> None:
        """Let go of the units that no submodule is using at the moment."""
        for unit, _ in list(self._resident.values()):
            if all_of_them or self._in_use[id(unit)] <= 0:
                self._drop(unit)

    def _drop(self, unit: Unit) -> None:
        _, flat = self._resident.pop(id(unit))
        del self._by_storage[storage_key(flat)]
        with torch.inference_mode(False), torch.no_grad():
            for slot in unit.slots if self._sharding.is_whole else ():
                slot.parameter.data = slot.hollow


class _Watch(TorchFunctionMode):
    """Shows every parameter that a function of torch is given."""

    def __init__(self, check: Callable[[Any, str], None]) -> None:
        super().__init__()
        self._check = check

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _TELLS_NO_VALUES and not _is_bookkeeping(name):
            for value in itertools.chain(args, (kwargs or {}).values()):
                for inner in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(inner, nn.Parameter):
                        self._check(inner, name)
        return func(*args, **(kwargs or {}))


def _is_bookkeeping(name: str) -> bool:
    """Whether this is one of torch's private questions, such as `_is_view`."""
    return name.startswith("_") and not name.startswith(("__", "_foreach"))


def _is_trainable(unit: Unit) -> bool:
    return any(slot.parameter.requires_grad for slot in unit.slots)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """A module, or those inside of it that are surely called one by one."""
    if type(module) is nn.Sequential and len(module):
        for child in module:
            yield from _parts(child)
    else:
        yield module


def groups_of(root: nn.Module, called: Iterable[str], parameters: dict[int, tuple[str, nn.Parameter]]) -> list[Any]:
    """Parameters of a network in the order of their use; those of one submodule are used together.

    Args:
        root: The network.
        called: Names of the submodules that it calls, in order.
        parameters: `id` of each parameter that is to be cut -> its name in the LightningModule and itself.

    Returns:
        Groups of named parameters. What no submodule has, and code reads as attributes, comes first.
    """
    left = dict(parameters)
    groups = []
    for name in called:
        for part in _parts(root.get_submodule(name)):
            groups.append([left.pop(id(p)) for p in part.parameters() if id(p) in left])
    read = [left.pop(id(p)) for p in root.parameters() if id(p) in left]
    return [read, *groups]
