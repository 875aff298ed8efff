"""From a recorded graph to stages: which nodes form blocks, where each block goes, and the code of each stage."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from lightning_cnnpar import tree
from lightning_cnnpar._compat import storage_key
from lightning_cnnpar.partition.abstract import UNKNOWN
from lightning_cnnpar.partition.ambient import Ambient
from lightning_cnnpar.partition.cost import size_in_bytes
from lightning_cnnpar.partition.errors import PartitionError
from lightning_cnnpar.partition.stage import Program, Stage
from lightning_cnnpar.partition.trace import CONSTANT_PREFIX, Traced, check_same

_STEPS = ("call_module", "call_function", "call_method")


def is_tensor(node: fx.Node) -> bool:
    """Whether a node's value is one tensor, which may travel."""
    return isinstance(node.meta["value"], Tensor)


def is_plain(node: fx.Node) -> bool:
    """Whether a node gives sizes or other plain values, which are computed again wherever they are needed."""
    value = node.meta["value"]
    if node.op not in ("call_function", "call_method") or value is UNKNOWN or node.target is check_same:
        return False
    return not any(isinstance(leaf, Tensor) for leaf in tree.flatten(value)[0])


@dataclasses.dataclass(kw_only=True)
class Block:
    """Nodes that stay together.

    Attributes:
        nodes: In order.
        tensors: Names of the parameters and buffers that they use.
    """

    nodes: list[fx.Node]
    tensors: set[str]


def tensors_used(root: nn.Module, node: fx.Node) -> set[str]:
    """Names of the parameters and buffers that a node uses, those of a called module included."""
    used = set(node.meta["work"].tensors)
    if node.op == "call_module":
        prefix = f"{node.target}."
        module = root.get_submodule(str(node.target))
        used |= {prefix + name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    for source in node.all_input_nodes:
        if source.op == "get_attr" and not str(source.target).startswith(CONSTANT_PREFIX):
            used.add(str(source.target))
    return used


def blocks_of(traced: Traced, root: nn.Module, together: Iterable[str], first_names: Mapping[str, str]) -> list[Block]:
    """The graph as a row of blocks between which it may be cut.

    Args:
        traced: The recorded forward.
        root: The network.
        together: Names of tensors whose uses are not to be parted.
        first_names: Any name of a tensor -> its first name.
    """
    nodes = [node for node in traced.graph.nodes if node.op in _STEPS and not is_plain(node)]
    position = {node: i for i, node in enumerate(nodes)}
    used = [{first_names.get(name, name) for name in tensors_used(root, node)} for node in nodes]
    joined = [False] * (len(nodes) + 1)

    def join(start: int, end: int) -> None:
        for boundary in range(start + 1, end + 1):
            joined[boundary] = True

    for node in nodes:
        if not is_tensor(node):
            readers = [position[reader] for reader in _steps_reading(node) if reader in position]
            join(position[node], max(readers, default=position[node]))
        if node.meta["wrote"]:
            join(_first_of(nodes, node), position[node])
    for name in together:
        places = [i for i, names in enumerate(used) if name in names]
        if places:
            join(places[0], places[-1])
    blocks: list[Block] = []
    for i, node in enumerate(nodes):
        if joined[i] and blocks:
            blocks[-1].nodes.append(node)
            blocks[-1].tensors |= used[i]
        else:
            blocks.append(Block(nodes=[node], tensors=set(used[i])))
    return blocks


def _steps_reading(node: fx.Node) -> list[fx.Node]:
    """The steps that need a node's value, through plain values too."""
    found, pending = [], list(node.users)
    while pending:
        user = pending.pop()
        if is_plain(user):
            pending.extend(user.users)
        else:
            found.append(user)
    return found


def _first_of(nodes: Sequence[fx.Node], writer: fx.Node) -> int:
    """Position of the first step whose result shares memory with what `writer` writes."""
    for i, node in enumerate(nodes):
        leaves = tree.flatten(node.meta["value"])[0]
        if any(isinstance(leaf, Tensor) and storage_key(leaf) in writer.meta["wrote"] for leaf in leaves):
            return i
    return 0


def crossing_bytes(blocks: Sequence[Block]) -> list[int]:
    """Bytes that cross before each block; one entry more at the end, 0 at both ends."""
    index = {node: i for i, block in enumerate(blocks) for node in block.nodes}
    total = [0] * (len(blocks) + 1)
    for node, start in index.items():
        last = max((index[reader] for reader in _steps_reading(node) if reader in index), default=start)
        if is_tensor(node):
            for boundary in range(start + 1, last + 1):
                total[boundary] += size_in_bytes(node.meta["value"])
    return total


class Assembler:
    """Makes the program of a placed graph."""

    def __init__(self, root: nn.Module, traced: Traced) -> None:
        self._root = root
        self._traced = traced
        self._leaf_of = {node: index for index, node in traced.inputs.items()}

    def program(self, groups: Sequence[tuple[int, Sequence[fx.Node]]]) -> Program:
        """The program of consecutive groups of nodes, each with its rank."""
        home = {node: i for i, (_, nodes) in enumerate(groups) for node in nodes}
        outputs = self._output_nodes(home)
        sources = [self._sources(nodes, home, i) for i, (_, nodes) in enumerate(groups)]
        needed = set(itertools.chain.from_iterable(values for _, values in sources))
        stages = []
        for i, (rank, nodes) in enumerate(groups):
            inputs, received = sources[i]
            sends = [node for node in nodes if node in needed]
            made = [number for number, node in enumerate(outputs) if home[node] == i]
            function = self._function(nodes, inputs, received, sends, [outputs[number] for number in made])
            stages.append(
                Stage(
                    index=i,
                    rank=rank,
                    inputs=tuple(self._leaf_of[node] for node in inputs),
                    receives=tuple(node.name for node in received),
                    sends=tuple(node.name for node in sends),
                    outputs=tuple(made),
                    modules=tuple(dict.fromkeys(str(n.target) for n in nodes if n.op == "call_module")),
                    function=function,
                )
            )
        return Program(
            stages=tuple(stages),
            num_outputs=len(outputs),
            is_batched=self._traced.is_batched,
            assembly=self._assembly(outputs),
        )

    def _output_nodes(self, home: Mapping[fx.Node, int]) -> list[fx.Node]:
        found: dict[fx.Node, None] = {}
        for leaf in self._traced.leaves:
            if isinstance(leaf, fx.Node):
                for node in self._roots(leaf, home):
                    found.setdefault(node)
        return list(found)

    def _roots(self, node: fx.Node, home: Mapping[fx.Node, int]) -> list[fx.Node]:
        """The steps' results that a leaf of the output is computed from."""
        if node in home:
            if not is_tensor(node):
                raise PartitionError(
                    f"The network returns {node.meta['value']!r} from {node.name}, which isn't a tensor."
                )
            return [node]
        if node.op == "placeholder":
            return []
        if node.op == "get_attr":
            raise PartitionError(f"The network returns its own tensor {node.target!r}; return a computed value.")
        return [root for source in node.all_input_nodes for root in self._roots(source, home)]

    def _sources(
        self, nodes: Sequence[fx.Node], home: Mapping[fx.Node, int], stage: int
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        """Input leaves and earlier values that a stage reads."""
        inputs: dict[fx.Node, None] = {}
        received: dict[fx.Node, None] = {}
        pending = [source for node in nodes for source in node.all_input_nodes]
        while pending:
            source = pending.pop(0)
            if source.op == "placeholder":
                inputs.setdefault(source)
            elif source in home:
                if home[source] != stage:
                    received.setdefault(source)
            else:
                pending.extend(source.all_input_nodes)
        return list(inputs), list(received)

    def _function(
        self,
        nodes: Sequence[fx.Node],
        inputs: Sequence[fx.Node],
        received: Sequence[fx.Node],
        sends: Sequence[fx.Node],
        made: Sequence[fx.Node],
    ) -> Callable[..., Any]:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in (*inputs, *received):
            copies[node] = graph.placeholder(node.name)

        def copied(node: fx.Node) -> fx.Node:
            if node in copies:
                return copies[node]
            for source in node.all_input_nodes:
                copied(source)
            if node.op == "get_attr" and str(node.target).startswith(CONSTANT_PREFIX):
                value = self._traced.constants[str(node.target)]
                copies[node] = graph.call_function(_constant(value))
                return copies[node]
            ambient = node.meta.get("ambient")
            if ambient is None or ambient.is_plain or node.op not in _STEPS:
                copies[node] = graph.node_copy(node, lambda source: copies[source])
            else:
                copies[node] = _surrounded(graph, node, ambient, copies)
            return copies[node]

        for node in nodes:
            copied(node)
        graph.output((tuple(copies[node] for node in sends), tuple(copies[node] for node in made)))
        return _compiled(graph)

    def _assembly(self, outputs: Sequence[fx.Node]) -> Callable[[Sequence[Tensor], Sequence[Any]], Any]:
        traced, numbers = self._traced, {node: i for i, node in enumerate(outputs)}

        def assemble(values: Sequence[Tensor], inputs: Sequence[Any]) -> Any:
            known: dict[fx.Node, Any] = {node: values[i] for node, i in numbers.items()}
            known.update({node: inputs[index] for index, node in traced.inputs.items()})

            def value(node: fx.Node) -> Any:
                if node not in known:
                    args = fx.node.map_arg(node.args, value)
                    kwargs = fx.node.map_arg(node.kwargs, value)
                    if node.op == "call_method":
                        known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                    elif node.op == "get_attr":
                        known[node] = traced.constants[str(node.target)]
                    else:
                        known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
                return known[node]

            leaves = [value(leaf) if isinstance(leaf, fx.Node) else leaf for leaf in traced.leaves]
            return tree.unflatten(traced.spec, leaves)

        return assemble


def _constant(value: Any) -> Callable[[], Any]:
    def constant() -> Any:
        return value

    return constant


def _surrounded(graph: fx.Graph, node: fx.Node, ambient: Ambient, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """A copy of a node that runs in the grad mode and autocast state in which it was recorded."""
    args = fx.node.map_arg(node.args, lambda source: copies[source])
    kwargs = fx.node.map_arg(node.kwargs, lambda source: copies[source])
    if node.op == "call_module":
        module = graph.get_attr(str(node.target))
        return graph.call_function(ambient.around(lambda called, *a, **k: called(*a, **k)), (module, *args), kwargs)
    if node.op == "call_method":
        name = str(node.target)
        return graph.call_function(ambient.around(lambda first, *a, **k: getattr(first, name)(*a, **k)), args, kwargs)
    assert callable(node.target)
    return graph.call_function(ambient.around(node.target), args, kwargs)


def _compiled(graph: fx.Graph) -> Callable[..., Any]:
    """The graph as a Python function whose first argument is the network."""
    code = graph.python_code(root_module="self")
    scope: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<pipeline stage>", "exec"), scope)
    forward: Callable[..., Any] = scope["forward"]
    return forward
