"""Cutting a network into stages: what users and the strategy call.

Partitioner(root, 2).program(args, kwargs)    traced as coarse as balance allows, cut, placed; cached
split(network, example_args, 2)               the same, to look at and to run here
"""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_cnnpar import tree
from lightning_cnnpar.partition.abstract import AbstractNetwork
from lightning_cnnpar.partition.balance import ImbalanceError, Row, cut, stage_costs
from lightning_cnnpar.partition.cost import TRANSFER_WEIGHT, Metric, memory_in_bytes, module_shares, size_in_bytes
from lightning_cnnpar.partition.errors import PartitionError, UntraceableError, untraceable
from lightning_cnnpar.partition.foreign import is_foreign
from lightning_cnnpar.partition.layout import Assembler, Block, blocks_of, crossing_bytes
from lightning_cnnpar.partition.stage import Program
from lightning_cnnpar.partition.trace import Traced, trace

__all__ = [
    "Partition",
    "PartitionError",
    "Partitioner",
    "StageRow",
    "TooManyStagesError",
    "UntraceableError",
    "split",
]

# Finest shares of a module that stays opaque, by attempt: coarse graphs trace best, fine ones balance best.
_OPAQUE_SHARES = (0.25, 0.06, 0.0)
_GOOD_BALANCE = 1.15
# Keeping tied parameters on one stage may cost this much balance; beyond, each stage that uses them keeps them.
_TIED_BALANCE = 1.5


class TooManyStagesError(PartitionError):
    """More stages were asked for than a network can be cut into."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageRow:
    """One stage, to be shown.

    Attributes:
        stage: Its index.
        rank: Pipeline rank that runs it.
        modules: Submodules called in it.
        parameters: Elements of the parameters that it owns.
        bytes: Their size, buffers included.
        flops: Operations of forward and backward of the example batch; 0 if they couldn't be counted.
        share: Its part of the whole cost that was balanced.
    """

    stage: int
    rank: int
    modules: tuple[str, ...]
    parameters: int
    bytes: int
    flops: float
    share: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cut:
    """A graph cut in stages: the rank and the blocks of each."""

    traced: Traced
    stages: tuple[tuple[int, tuple[Block, ...]], ...]
    imbalance: float


class Partitioner:
    """Cuts one network, for every way in which it is called, so that each parameter keeps its place.

    Args:
        root: The network.
        num_ranks: P, over how many ranks.
        balance: "flops", "parameters", "memory", "time", or relative speeds of the ranks.
        cut_points: Names of modules that start a new stage, V P - 1 of them; `None` balances.
        owners: Ranks of parameters and buffers that other networks have placed, by their names in `root`.
        name: Of the network, for messages.
        stages_per_rank: V; stage s goes to rank s mod P.
    """

    def __init__(
        self,
        root: nn.Module,
        num_ranks: int,
        *,
        balance: str | Sequence[float] = "flops",
        cut_points: Sequence[str] | None = None,
        owners: Mapping[str, int] | None = None,
        name: str = "model",
        stages_per_rank: int = 1,
    ) -> None:
        self._root = root
        self._num_ranks = num_ranks
        self._num_stages = num_ranks * stages_per_rank
        self._size = "pipeline_parallel_size" if stages_per_rank == 1 else "pipeline_parallel_size x stages_per_rank"
        self._speeds = [1.0] * num_ranks if isinstance(balance, str) else list(balance)
        self._metric: Metric = balance if isinstance(balance, str) else "flops"  # type: ignore[assignment]
        self._cut_points = cut_points
        self._name = name
        self._programs: dict[Any, Program] = {}
        self._by_shape: set[Any] = set()
        self._rows: tuple[StageRow, ...] = ()
        self._elements = {key: parameter.numel() for key, parameter in root.named_parameters()}
        self.owners: dict[str, int] = dict(owners or {})
        self.shared: frozenset[str] = frozenset()
        if len(self._speeds) != num_ranks:
            raise PartitionError(
                f"balance={list(self._speeds)} gives {len(self._speeds)} speeds for {num_ranks} ranks of a replica."
            )
        self._speeds *= stages_per_rank

    def program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        """The program for these inputs and the network's present training flags.

        Raises:
            UntraceableError: If the forward can't be followed.
            TooManyStagesError: If there are fewer places to cut than stages asked for.
        """
        leaves, spec = tree.flatten((args, kwargs))
        key = self._key(leaves, spec)
        if key not in self._programs:
            try:
                if not self._programs:
                    self._place(leaves, spec)
                return self._make(leaves, spec)
            except PartitionError:
                self._raise_own_error(args, kwargs)
                raise
        return self._programs[key]

    def adopt(self, owners: Mapping[str, int], shared: Iterable[str]) -> None:
        """Place parameters and buffers as another replica did."""
        self.owners.update(owners)
        self.shared |= frozenset(shared)

    def _raise_own_error(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Inputs that the network itself refuses give its own error, not one about cutting."""
        if not any(is_foreign(tensor) for tensor in (*self._root.parameters(), *self._root.buffers())):
            with torch.no_grad():
                self._forward(*args, **kwargs)

    def table(self) -> tuple[StageRow, ...]:
        """The stages; empty before the first program."""
        return self._rows

    def _key(self, leaves: Sequence[Any], spec: tree.TreeSpec) -> Any:
        signature = self._signature(leaves, spec)
        return (signature, _shapes(leaves)) if signature in self._by_shape else signature

    def _signature(self, leaves: Sequence[Any], spec: tree.TreeSpec) -> Any:
        flags = tuple(module.training for module in self._root.modules())
        values = tuple(leaf.dim() if isinstance(leaf, Tensor) else _hashable(leaf) for leaf in leaves)
        return flags, spec, values

    def _place(self, leaves: Sequence[Any], spec: tree.TreeSpec) -> None:
        """Decide where parameters live by the graph of training, which uses them all."""
        if all(module.training for module in self._root.modules()):
            return
        with _training(self._root), contextlib.suppress(PartitionError):
            self._make(leaves, spec)

    def _make(self, leaves: Sequence[Any], spec: tree.TreeSpec) -> Program:
        found = self._cut(leaves, spec)
        if found.traced.guarded:
            # Another image size, or another number of boxes, may take another branch: it gets a program of its own.
            self._by_shape.add(self._signature(leaves, spec))
        groups = [(rank, [node for block in blocks for node in block.nodes]) for rank, blocks in found.stages]
        program = Assembler(self._root, found.traced).program(groups)
        self._own(found)
        self._programs[self._key(leaves, spec)] = program
        return program

    # Cutting --------------------------------------------------------------------------------------------------------

    def _cut(self, leaves: Sequence[Any], spec: tree.TreeSpec) -> _Cut:
        """The best cut, tracing finer as long as the balance is poor."""
        best: _Cut | None = None
        error: PartitionError | None = None
        network = AbstractNetwork(self._root, _device_of(self._root))
        metric: Metric = "flops" if self._metric == "time" else self._metric
        shares, _ = module_shares(network, self._forward, leaves, spec, metric)
        for finest in _OPAQUE_SHARES:
            try:
                found = self._cut_traced(self._trace(network, leaves, spec, shares, finest))
            except TooManyStagesError as failure:
                error = failure
                continue
            if best is None or found.imbalance < best.imbalance:
                best = found
            if best.imbalance <= _GOOD_BALANCE or self.owners:
                break
        if best is None:
            assert error is not None
            raise error
        return best

    @property
    def _forward(self) -> Callable[..., Any]:
        return MethodType(type(self._root).forward, self._root)

    def _trace(
        self,
        network: AbstractNetwork,
        leaves: Sequence[Any],
        spec: tree.TreeSpec,
        shares: Mapping[str, float],
        finest: float,
    ) -> Traced:
        try:
            return trace(network, self._forward, leaves, spec, lambda p, m: self._is_opaque(p, m, shares, finest))
        except Exception as cause:
            heavy = sorted(((s, n) for n, s in shares.items() if n and "." not in n and s > 0.1), reverse=True)
            # The module itself goes by its class's name; names of others are those that `network=` wants.
            around = "" if self._name == type(self._root).__name__ else f"{self._name}."
            candidates = [around + n for _, n in heavy]
            raise untraceable(self._name, type(self._root).__name__, cause, candidates, self._num_stages) from cause

    def _is_opaque(self, path: str, module: nn.Module, shares: Mapping[str, float], finest: float) -> bool:
        if _is_torch_layer(module):
            return True
        if any(point.startswith(f"{path}.") for point in self._cut_points or ()):
            return False
        names = [f"{path}.{name}" for name, _ in (*module.named_parameters(), *module.named_buffers())]
        if len({self.owners[name] for name in names if name in self.owners}) > 1:
            return False
        return shares.get(path, 0.0) < finest / self._num_stages

    def _cut_traced(self, traced: Traced) -> _Cut:
        first = self._first_names()
        blocks = blocks_of(traced, self._root, (), first)
        if self.owners:
            return self._follow_owners(traced, blocks)
        apart = self._search(traced, blocks)
        tied = _used_by_several(blocks)
        if not tied:
            return apart
        with contextlib.suppress(TooManyStagesError):
            kept = self._search(traced, blocks_of(traced, self._root, tied, first))
            if kept.imbalance <= _TIED_BALANCE * apart.imbalance:
                return kept
        return apart

    def _search(self, traced: Traced, blocks: list[Block]) -> _Cut:
        costs = [self._cost(block) for block in blocks]
        weight = TRANSFER_WEIGHT[self._metric]
        row = Row(
            costs=costs,
            crossing=[size * weight for size in crossing_bytes(blocks)],
            substantial=[bool(block.tensors) or cost > 0 for block, cost in zip(blocks, costs, strict=True)],
        )
        try:
            boundaries = self._user_boundaries(blocks) or cut(row, self._speeds)
        except ImbalanceError as error:
            raise TooManyStagesError(
                f"{self._name!r} can be cut into {error.possible} stages at most, {self._num_stages} were asked for."
                f" Use {self._size}={max(1, error.possible)} or less."
            ) from error
        ends = (*boundaries, len(blocks))
        stages = tuple(
            (number % self._num_ranks, tuple(blocks[start:end]))
            for number, (start, end) in enumerate(zip((0, *boundaries), ends, strict=True))
        )
        per_stage = stage_costs(row, boundaries, self._speeds)
        ideal = (sum(costs) / sum(self._speeds)) or 1.0
        return _Cut(traced=traced, stages=stages, imbalance=max(per_stage) / ideal)

    def _user_boundaries(self, blocks: Sequence[Block]) -> tuple[int, ...]:
        if self._cut_points is None:
            return ()
        if len(self._cut_points) != self._num_stages - 1:
            raise PartitionError(
                f"cut_points={list(self._cut_points)} makes {len(self._cut_points) + 1} stages,"
                f" {self._size} is {self._num_stages}: name {self._num_stages - 1} modules."
            )
        found = []
        for point in self._cut_points:
            places = [i for i, block in enumerate(blocks) if _is_inside(block.nodes[0], point)]
            if not places or places[0] == 0:
                starts = [str(b.nodes[0].target) for b in blocks[1:] if b.nodes[0].op == "call_module"]
                raise PartitionError(
                    f"cut_points: no stage of {self._name!r} can start at {point!r}. Possible: {', '.join(starts)}."
                )
            found.append(places[0])
        if sorted(set(found)) != found:
            raise PartitionError(f"cut_points={list(self._cut_points)} are not in the order in which they are called.")
        return tuple(found)

    def _follow_owners(self, traced: Traced, blocks: list[Block]) -> _Cut:
        """Stages along the places that parameters have already; what has none stays with its neighbours."""
        stages: list[tuple[int, list[Block]]] = []
        places = [self._place_of(block) for block in blocks]
        # What comes before the first placed block, if only tied tensors are used there, starts where those were placed.
        hints = [self.owners[name] for name in sorted(blocks[0].tensors & self.shared)]
        current = next((place for place in (*hints, *places) if place is not None), 0)
        for block, place in zip(blocks, places, strict=True):
            current = current if place is None else place
            if stages and stages[-1][0] == current:
                stages[-1][1].append(block)
            else:
                stages.append((current, [block]))
        return _Cut(traced=traced, stages=tuple((rank, tuple(part)) for rank, part in stages), imbalance=1.0)

    def _place_of(self, block: Block) -> int | None:
        places = {self.owners[name] for name in block.tensors if name in self.owners and name not in self.shared}
        if len(places) > 1:
            named = ", ".join(sorted(block.tensors)[:4])
            raise PartitionError(
                f"{self._name!r} uses parameters of several ranks in one operation: {named}."
                f" Call the networks in validation as in training, or name the enclosing one: `network=...`."
            )
        return next(iter(places), None)

    # Accounts -------------------------------------------------------------------------------------------------------

    def _cost(self, block: Block) -> float:
        elements = sum(self._elements.get(name, 0) for name in block.tensors)
        flops = float(3.0 * sum(node.meta["work"].flops for node in block.nodes))
        if self._metric == "parameters":
            return float(elements)
        if self._metric == "memory":
            kept = sum(node.meta["work"].activation_bytes for node in block.nodes)
            return memory_in_bytes(elements, kept)
        return float(flops or elements)

    def _first_names(self) -> dict[str, str]:
        named = [
            *self._root.named_parameters(remove_duplicate=False),
            *self._root.named_buffers(remove_duplicate=False),
        ]
        first: dict[int, str] = {}
        return {name: first.setdefault(id(tensor), name) for name, tensor in named}

    def _own(self, found: _Cut) -> None:
        places: dict[str, set[int]] = {}
        for rank, blocks in found.stages:
            for block in blocks:
                for name in block.tensors:
                    places.setdefault(name, set()).add(rank)
        first = self._first_names()
        self.shared |= {name for name, ranks in places.items() if len(ranks) > 1}
        owned = {name: min(ranks) for name, ranks in places.items()}
        for name, original in first.items():
            if original in owned:
                self.owners.setdefault(name, owned[original])
        if not self._rows:
            total = sum(self._cost(block) for _, blocks in found.stages for block in blocks) or 1.0
            self._rows = tuple(self._row(i, rank, blocks, total) for i, (rank, blocks) in enumerate(found.stages))

    def _row(self, index: int, rank: int, blocks: Sequence[Block], total: float) -> StageRow:
        names = {name for block in blocks for name in block.tensors}
        parameters = [p for name, p in self._root.named_parameters() if name in names]
        buffers = [b for name, b in self._root.named_buffers() if name in names]
        nodes = [node for block in blocks for node in block.nodes]
        return StageRow(
            stage=index,
            rank=rank,
            modules=tuple(dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module")),
            parameters=sum(p.numel() for p in parameters),
            bytes=sum(map(size_in_bytes, (*parameters, *buffers))),
            flops=3.0 * sum(node.meta["work"].flops for node in nodes),
            share=sum(map(self._cost, blocks)) / total,
        )


class Partition:
    """A network cut in stages, to look at and to run in this process.

    Attributes:
        stages: The stages, in order.
        parameters: For each stage the names of its parameters, as in the network.
    """

    def __init__(self, network: nn.Module, partitioner: Partitioner, program: Program) -> None:
        self._network = network
        self._partitioner = partitioner
        self.stages = program.stages
        named = [name for name, _ in network.named_parameters()]
        self.parameters = tuple(
            tuple(name for name in named if partitioner.owners.get(name) == stage.rank) for stage in program.stages
        )

    @property
    def rows(self) -> tuple[StageRow, ...]:
        """The stages as data."""
        return self._partitioner.table()

    def table(self) -> str:
        """One line a stage: modules, parameters, operations, share."""
        lines = ["stage  parameters       FLOPs  share  modules"]
        for row in self._partitioner.table():
            modules = ", ".join(row.modules if len(row.modules) < 5 else (row.modules[0], "...", row.modules[-1]))
            lines.append(f"{row.stage:>5}  {row.parameters:>10,}  {row.flops:>10.3g}  {row.share:>5.0%}  {modules}")
        return "\n".join(lines)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages here, one after the other."""
        program = self._partitioner.program(args, kwargs)
        leaves, _ = tree.flatten((args, kwargs))
        values: dict[str, Tensor] = {}
        outputs: dict[int, Tensor] = {}
        for stage in program.stages:
            sent, made = stage(
                self._network, [leaves[i] for i in stage.inputs], [values[name] for name in stage.receives]
            )
            values.update(zip(stage.sends, sent, strict=True))
            outputs.update(zip(stage.outputs, made, strict=True))
        return program.assemble([outputs[i] for i in range(program.num_outputs)], leaves)


def split(
    network: nn.Module,
    example_args: tuple[Any, ...],
    num_stages: int = 2,
    *,
    balance: str | Sequence[float] = "flops",
    cut_points: Sequence[str] | None = None,
) -> Partition:
    """Cut a network into stages.

    Args:
        network: Any module; it stays as it is.
        example_args: Positional arguments of its forward.
        num_stages: How many stages.
        balance: What stages are balanced by; see `HybridStrategy`.
        cut_points: Names of modules that start a new stage.

    Raises:
        PartitionError: If it can't be cut so; the message says what can be done.
    """
    partitioner = Partitioner(network, num_stages, balance=balance, cut_points=cut_points, name=type(network).__name__)
    return Partition(network, partitioner, partitioner.program(tuple(example_args), {}))


@contextlib.contextmanager
def _training(root: nn.Module) -> Iterator[None]:
    flags = [(module, module.training) for module in root.modules()]
    try:
        for module, _ in flags:
            module.training = True
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def _used_by_several(blocks: Sequence[Block]) -> list[str]:
    uses = collections.Counter(name for block in blocks for name in block.tensors)
    return [name for name, count in uses.items() if count > 1]


def _is_inside(node: fx.Node, module: str) -> bool:
    path = str(node.target) if node.op == "call_module" else str(node.meta.get("path", ""))
    return path == module or path.startswith(f"{module}.")


def _is_torch_layer(module: nn.Module) -> bool:
    """A layer of torch, or a subclass of one without modules inside, such as a synchronised BatchNorm: never cut."""
    if module.__module__.startswith("torch.nn"):
        return not isinstance(module, nn.Sequential)
    leaf = next(module.children(), None) is None
    return leaf and any(
        base.__module__.startswith("torch.nn.") for base in type(module).__mro__ if base is not nn.Module
    )


def _shapes(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Shapes of tensors without the batch size, on which no branch is decided."""
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
    size = next((shape[0] for shape in shapes if shape), None)
    return tuple(("batch", *shape[1:]) if shape and shape[0] == size else shape for shape in shapes)


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _device_of(root: nn.Module) -> torch.device:
    devices = (p.device for p in root.parameters() if p.device.type != "meta")
    return next(devices, torch.device("cpu"))
