"""Recording a network's forward as a graph, as coarse as asked.

The forward runs once on stand-ins. Calls of *opaque* modules become one node each; the others are followed inside:

    forward(x)  ──►  x ─ conv1 ─ bn1 ─ relu ─ layer1.0 ─ layer1.1 ─ ... ─ fc ─► output

A module that can't be followed (control flow on values, NumPy, attributes written) becomes opaque, whatever it weighs.
"""

import contextlib
import dataclasses
import enum
import math
import operator
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError
from torch.utils.checkpoint import checkpoint

from lightning_cnnpar import _compat, tree
from lightning_cnnpar.partition.abstract import (
    UNKNOWN,
    AbstractNetwork,
    Outcome,
    Work,
    preserved_generators,
    run_unhooked,
)
from lightning_cnnpar.partition.ambient import Ambient
from lightning_cnnpar.partition.errors import PartitionError, is_user_file
from lightning_cnnpar.partition.proxy import NetworkProxy

CONSTANT_PREFIX = "__constant_"
_BAKED = (bool, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.memory_format, torch.layout)
_NUMBERS = (int, float, complex)
_FACTORIES = ("zeros", "ones", "full", "empty", "arange", "linspace", "eye", "tensor", "as_tensor")
_RANDOM_FACTORIES = ("rand", "randn", "randint", "randperm", "normal")
# Answers that may differ between one process and a stage, so no branch may be decided on them.
_UNSTABLE = frozenset({"requires_grad", "is_leaf", "grad_fn", "grad", "is_contiguous", "stride", "data_ptr"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """A recorded forward.

    Every node's `meta` has "value" (with fake tensors, or `UNKNOWN`), "work", "path" (dotted name of the innermost
    module that it belongs to), "ambient" (grad mode and autocast it ran in), "wrote" (storage keys written in place)
    and "exact".

    Attributes:
        graph: The graph; its output node holds the tuple of output leaves that are nodes.
        inputs: Placeholder of each input leaf that isn't a constant, by index of the leaf.
        spec: Container of the output.
        leaves: Leaves of the output: nodes and constants.
        constants: Tensors and objects met in the forward, by their target name in the graph.
        followed: Names of the modules whose inside was recorded.
        opaque_reasons: Why modules that should have been followed stayed opaque.
        guarded: Whether a branch was decided on sizes or numbers of the input.
        is_batched: Whether the first layers take another size of dimension 0, so that this may be the batch.
    """

    graph: fx.Graph
    inputs: dict[int, fx.Node]
    spec: tree.TreeSpec
    leaves: tuple[Any, ...]
    constants: dict[str, Any]
    followed: tuple[str, ...]
    opaque_reasons: dict[str, str]
    guarded: bool
    is_batched: bool


class _NotFollowed(Exception):  # noqa: N818 - it is caught here and means "try again"
    """A module's own forward can't be recorded."""

    def __init__(self, path: str, cause: BaseException) -> None:
        super().__init__(path)
        self.path = path
        self.cause = cause


def trace(
    network: AbstractNetwork,
    forward: Callable[..., Any],
    leaves: Sequence[Any],
    spec: tree.TreeSpec,
    is_opaque: Callable[[str, nn.Module], bool],
) -> Traced:
    """Record `forward`, trying again with one more opaque module for each that can't be followed.

    Args:
        network: The network on fake tensors.
        forward: The network's bound forward.
        leaves: Leaves of the flattened `(args, kwargs)`.
        spec: Their container.
        is_opaque: Whether a module, given with its name, is to be one node.

    Raises:
        Exception: Whatever the network's own forward raised while it was recorded.
    """
    reasons: dict[str, BaseException] = {}
    numbers_baked = False
    while True:
        tracer = NetworkTracer(network, lambda path, m: path in reasons or is_opaque(path, m), numbers_baked)
        try:
            with preserved_generators():
                traced = tracer.record(forward, leaves, spec)
            return dataclasses.replace(traced, opaque_reasons={k: str(v) for k, v in reasons.items()})
        except _NotFollowed as failure:
            reasons[failure.path] = failure.cause
        except Exception:
            if numbers_baked or not any(isinstance(leaf, _NUMBERS) for leaf in leaves):
                raise
            numbers_baked = True


class NetworkTracer(fx.Tracer):
    """Records one forward. See `trace`."""

    def __init__(
        self, network: AbstractNetwork, is_opaque: Callable[[str, nn.Module], bool], numbers_baked: bool = False
    ) -> None:
        super().__init__(autowrap_modules=(math,))
        self._network = network
        self._is_opaque = is_opaque
        self._numbers_baked = numbers_baked
        self._path = ""
        self._inputs: dict[int, fx.Node] = {}
        self._constants: dict[str, Any] = {}
        self._constant_names: dict[int, str] = {}
        self._attributes: dict[str, NetworkProxy] = {}
        self._followed: list[str] = []
        self._guarded = False
        self._is_batched = True
        self._output: tuple[tree.TreeSpec, tuple[Any, ...]] | None = None
        self._other_batch: _OtherBatch | None = None

    # Recording ------------------------------------------------------------------------------------------------------

    def record(self, forward: Callable[..., Any], leaves: Sequence[Any], spec: tree.TreeSpec) -> Traced:
        """Run `forward` on stand-ins for `leaves`."""
        self._forward, self._leaves, self._spec = forward, leaves, spec
        function = getattr(forward, "__func__", forward)

        def body() -> fx.Graph:
            self._base = Ambient.now()
            self._name_everything()
            with self._patched():
                return self.trace(function if isinstance(function, FunctionType) else _placeholder_function)

        graph = self._network.within(body, self._refuse_write)
        assert self._output is not None
        spec, output_leaves = self._output
        return Traced(
            graph=graph,
            inputs=self._inputs,
            spec=spec,
            leaves=output_leaves,
            constants=self._constants,
            followed=tuple(self._followed),
            opaque_reasons={},
            guarded=self._guarded,
            is_batched=self._is_batched,
        )

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Placeholders for the leaves; what `torch.fx` then calls is `_run_forward`."""
        self.root = self._network.root
        for index, leaf in enumerate(self._leaves):
            if isinstance(leaf, _BAKED) or (self._numbers_baked and isinstance(leaf, _NUMBERS)):
                continue
            proxy = self.create_proxy("placeholder", f"leaf_{index}", (), {})
            proxy.node.meta["value"] = self._network.fake(leaf)
            self._inputs[index] = proxy.node
        return self._run_forward, []

    def _run_forward(self) -> Any:
        stand_ins = [
            self.proxy(self._inputs[index]) if index in self._inputs else leaf
            for index, leaf in enumerate(self._leaves)
        ]
        args, kwargs = tree.unflatten(self._spec, stand_ins)
        with self._own_draws_refused():
            output = self._forward(*args, **kwargs)
        leaves, spec = tree.flatten(output)
        self._output = spec, tuple(self._output_leaf(leaf) for leaf in leaves)
        self._is_batched = self._takes_other_batch()
        return tuple(self.proxy(leaf) for leaf in self._output[1] if isinstance(leaf, fx.Node))

    def _output_leaf(self, leaf: Any) -> Any:
        if _is_proxy(leaf):
            return leaf.node
        if isinstance(leaf, Tensor):
            return self.create_arg(leaf)
        if any(_is_proxy(value) for value in getattr(leaf, "__dict__", {}).values()):
            raise TraceError(
                f"the output holds a {type(leaf).__name__}, whose tensors can't be seen; return tensors in tuples,"
                f" lists, dictionaries, named tuples or dataclasses"
            )
        return leaf

    # What torch.fx asks ---------------------------------------------------------------------------------------------

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """One node for an opaque module; else its forward is followed."""
        if self._network.running:
            return run_unhooked(m, forward, args, kwargs)
        path = self._module_names.get(id(m))
        if path is None:
            # Made inside a forward, as in `nn.Softmax(1)(x)`: its operations are recorded.
            return forward(*args, **kwargs)
        with self._inside(path):
            if self._is_opaque(path, m):
                return self.create_proxy("call_module", path, args, kwargs)
            self._followed.append(path)
            try:
                with self._own_draws_refused():
                    return forward(*args, **kwargs)
            except _NotFollowed:
                raise
            except Exception as error:
                raise _NotFollowed(path, error) from error

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """A stand-in for a parameter or buffer that the forward reads itself."""
        if self._network.running or not isinstance(attr_val, Tensor):
            return attr_val
        name = self._tensor_names.get(id(attr_val))
        return attr_val if name is None else self._attribute(name)

    def create_arg(self, a: Any) -> Any:
        """Arguments of nodes, with tensors and objects that aren't values of the network kept as constants."""
        if _is_proxy(a):
            return a.node
        if isinstance(a, (Tensor, nn.Module)):
            name = self._tensor_names.get(id(a)) or self._module_names.get(id(a))
            return self._attribute(name).node if name is not None else self._constant(a)
        if isinstance(a, Mapping) and type(a) is not dict:
            a = dict(a)
        try:
            return super().create_arg(a)
        except NotImplementedError:
            return self._constant(a)

    def proxy(self, node: fx.Node) -> NetworkProxy:
        """The stand-in for a node's value."""
        return NetworkProxy(node, self)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> Any:
        """A stand-in; for containers with tensors the container itself, with a stand-in for each entry."""
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **named)
        if kind in ("call_function", "call_method", "call_module"):
            return self._opened(proxy, proxy.node.meta.get("value", UNKNOWN))
        return proxy

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> fx.Node:
        """A node with its value, cost and surroundings."""
        node = super().create_node(kind, target, args, kwargs, *rest, **named)
        node.meta.update(path=self._path, ambient=Ambient.now().relative_to(self._base), value=UNKNOWN, exact=True)
        node.meta.update(work=Work(), wrote=frozenset())
        if kind in ("call_function", "call_method", "call_module"):
            self._evaluate(node)
        return node

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Decide a branch on a size or number; refuse one on data."""
        return bool(self.concretize(obj))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Entries of a value of known length."""
        return iter(obj)

    # Values ---------------------------------------------------------------------------------------------------------

    def _evaluate(self, node: fx.Node) -> None:
        inputs = [n.meta["value"] for n in node.all_input_nodes]
        if any(value is UNKNOWN for value in inputs):
            node.meta["exact"] = False
            return
        before = [(tensor, _compat.tensor_version(tensor)) for tensor in inputs if isinstance(tensor, Tensor)]
        outcome = self.evaluate_with(node, lambda n: n.meta["value"])
        node.meta["value"], node.meta["work"] = outcome.value, outcome.work
        node.meta["exact"] = outcome.exact and all(n.meta["exact"] for n in node.all_input_nodes)
        node.meta["wrote"] = frozenset(
            _compat.storage_key(tensor) for tensor, version in before if _compat.tensor_version(tensor) != version
        )

    def evaluate_with(self, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Outcome:
        """Run one node on the values that `value_of` gives for its inputs."""
        args = fx.node.map_arg(node.args, value_of)
        kwargs = fx.node.map_arg(node.kwargs, value_of)
        if node.op == "call_module":
            module = self._modules[str(node.target)]
            return self._network.run(module, args, kwargs, module)
        function = node.target
        if node.op == "call_method":
            name = str(node.target)
            return self._network.run(lambda first, *a, **k: getattr(first, name)(*a, **k), args, kwargs)
        assert callable(function)
        return self._network.run(function, args, kwargs)

    def concretize(self, proxy: Any) -> Any:
        """The number behind a stand-in, recorded as something that must be so in every call.

        Raises:
            TraceError: If it depends on data, on the batch size or on how the network is run.
        """
        node = proxy.node
        value = node.meta["value"]
        if value is UNKNOWN or isinstance(value, Tensor) or not node.meta["exact"]:
            raise TraceError("control flow depends on the values of a tensor")
        unstable = _decided_by(node) & _UNSTABLE
        if unstable:
            raise TraceError(f"control flow depends on `{min(unstable)}`")
        if self._with_other_batch().value(node) != value:
            raise TraceError(f"control flow depends on the batch size (here it gives {value!r})")
        if self._inputs:
            self._guarded = True
            self.create_node("call_function", check_same, (node, value, self._user_place()), {})
        return value

    def _with_other_batch(self) -> "_OtherBatch":
        if self._other_batch is None:
            self._other_batch = _OtherBatch(self, self._network, self._inputs)
        return self._other_batch

    def _takes_other_batch(self) -> bool:
        """Whether everything up to the first layer runs with another size of dimension 0.

        An image without a batch dimension, or one flat sample, has channels or features there.
        """
        other = self._with_other_batch()
        for node in self.graph.nodes:
            known = node.meta.get("value", UNKNOWN)
            if known is UNKNOWN or not node.meta["exact"]:
                break
            value = other.value(node)
            if value is UNKNOWN:
                return False
            if node.meta["work"].tensors and getattr(value, "shape", None) != getattr(known, "shape", None):
                break
        return True

    def _opened(self, proxy: Any, value: Any) -> Any:
        leaves, spec = tree.flatten(value)
        if spec.kind == "leaf" or not any(isinstance(leaf, Tensor) for leaf in leaves):
            return None if value is None else proxy
        if spec.kind == "dataclass":
            entries = [self.create_proxy("call_function", getattr, (proxy, name), {}) for name in spec.keys]
            given = [getattr(value, name) for name in spec.keys]
        else:
            keys = spec.keys if spec.kind == "mapping" else range(len(spec.children))
            entries = [self.create_proxy("call_function", operator.getitem, (proxy, key), {}) for key in keys]
            given = [value[key] for key in keys]
        for index, entry in enumerate(given):
            if entry is None or isinstance(entry, str):
                entries[index] = entry
        flat = tree.TreeSpec(spec.kind, spec.container, spec.keys, (tree.LEAF,) * len(entries))
        return tree.unflatten(flat, entries)

    # Surroundings ---------------------------------------------------------------------------------------------------

    def _name_everything(self) -> None:
        root = self._network.root
        self._modules = dict(root.named_modules())
        self._module_names = {id(module): name for name, module in self._modules.items()}
        self._tensors: dict[str, Tensor] = dict([*root.named_parameters(), *root.named_buffers()])
        for path, module in self._modules.items():
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    self._tensors[f"{path}.{name}" if path else name] = value
        self._tensor_names = {id(tensor): name for name, tensor in reversed(self._tensors.items())}

    def _attribute(self, name: str) -> NetworkProxy:
        if name not in self._attributes:
            proxy = self.create_proxy("get_attr", name, (), {})
            value = self._modules.get(name, self._tensors.get(name))
            proxy.node.meta["value"] = self._network.fake(value) if isinstance(value, Tensor) else value
            self._attributes[name] = proxy
        return self._attributes[name]

    def _constant(self, value: Any) -> fx.Node:
        name = self._constant_names.get(id(value))
        if name is None:
            name = f"{CONSTANT_PREFIX}{len(self._constants)}"
            self._constants[name] = value
            self._constant_names[id(value)] = name
        node = self.create_node("get_attr", name, (), {})
        node.meta["value"] = self._network.fake(value) if isinstance(value, Tensor) else value
        return node

    @contextlib.contextmanager
    def _inside(self, path: str) -> Iterator[None]:
        outer, self._path = self._path, path
        try:
            yield
        finally:
            self._path = outer

    @contextlib.contextmanager
    def _own_draws_refused(self) -> Iterator[None]:
        """What a forward draws from Python's or NumPy's generator would be drawn once, now, for all steps."""
        before = _host_generators()
        yield
        if _host_generators() != before:
            raise TraceError("the forward draws from Python's `random` or from NumPy's generator")

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in (*_FACTORIES, *_RANDOM_FACTORIES):
                factory = getattr(torch, name)
                stack.enter_context(mock.patch.object(torch, name, self._factory(factory, name in _RANDOM_FACTORIES)))
            stack.enter_context(_compat.intercepted_checkpointing(self._checkpoint))
            stack.enter_context(_compat.checked_autograd_functions(self._refuse_proxies))
            yield

    def _checkpoint(self, original: Any, function: Any, args: Any, kwargs: Any, options: dict[str, Any]) -> Any:
        """The user's activation checkpointing: around a module it is kept, inside of other functions it is not."""
        if self._network.running:
            return original(function, args, kwargs, **options)
        if id(function) not in self._module_names:
            return function(*args, **kwargs)
        return self.create_proxy("call_function", checkpoint, (function, *args), {**options, **kwargs})

    def _refuse_proxies(self, args: Any) -> None:
        if _holds_proxy(args):
            raise TraceError("an `autograd.Function` is called outside of a module that can stay whole")

    def _refuse_write(self, module: nn.Module, name: str, value: Any) -> None:
        if id(module) in self._module_names and vars(module).get(name, UNKNOWN) is not value:
            raise TraceError(f"the forward sets the attribute `self.{name}` of a {type(module).__name__}")

    def _factory(self, original: Callable[..., Any], random_values: bool) -> Callable[..., Any]:
        # `torch.zeros(x.shape[0])` isn't dispatched to proxies; and a draw without proxies would become a constant.
        def create(*args: Any, **kwargs: Any) -> Any:
            if not self._network.running and (random_values or _holds_proxy((args, kwargs))):
                return self.create_proxy("call_function", original, args, kwargs)
            return original(*args, **kwargs)

        return create

    def _user_place(self) -> str:
        frame: Any = sys._getframe(1)
        while frame is not None and not is_user_file(frame.f_code.co_filename):
            frame = frame.f_back
        return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


class _OtherBatch:
    """The values that nodes would have with twice the batch size, computed when asked for."""

    def __init__(self, tracer: NetworkTracer, network: AbstractNetwork, inputs: Mapping[int, fx.Node]) -> None:
        self._tracer = tracer
        self._values: dict[fx.Node, Any] = {}
        tensors = [node.meta["value"] for node in inputs.values() if isinstance(node.meta["value"], Tensor)]
        size = next((tensor.shape[0] for tensor in tensors if tensor.dim()), None)
        for node in inputs.values():
            value = node.meta["value"]
            if isinstance(value, Tensor) and value.dim() and value.shape[0] == size:
                value = network.resized(value, 2 * value.shape[0])
            self._values[node] = value

    def value(self, node: fx.Node) -> Any:
        """The value of `node`; `UNKNOWN` if the network doesn't run with that batch size."""
        for earlier in node.graph.nodes:
            if earlier not in self._values:
                self._values[earlier] = self._compute(earlier)
            if earlier is node:
                break
        return self._values[node]

    def _compute(self, node: fx.Node) -> Any:
        if node.op not in ("call_function", "call_method", "call_module") or node.target is check_same:
            return node.meta["value"]
        if any(self._values[n] is UNKNOWN for n in node.all_input_nodes):
            return UNKNOWN
        outcome = self._tracer.evaluate_with(node, self._values.__getitem__)
        return outcome.value if outcome.exact else UNKNOWN


def check_same(value: Any, expected: Any, place: str) -> None:
    """Hold at run time what a branch was decided on when the network was cut.

    Raises:
        PartitionError: If this call would take another branch.
    """
    if value != expected:
        raise PartitionError(
            f"The network was cut for a call in which the value at {place} is {expected!r}; in this microbatch it is"
            f" {value!r}, so another branch would be right. Put that branch in an `nn.Module` of its own, which then"
            f" stays whole, or use `num_microbatches=1`."
        )


def _placeholder_function() -> None:
    """What `torch.fx` is told to trace where the forward is no plain function."""


def _is_proxy(value: Any) -> bool:
    return issubclass(type(value), fx.Proxy)


def _holds_proxy(value: Any) -> bool:
    return any(_is_proxy(leaf) for leaf in tree.flatten(value)[0])


def _decided_by(node: fx.Node) -> set[str]:
    """Names of the attributes and methods that a plain value was computed from."""
    names: set[str] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if isinstance(current.meta["value"], Tensor):
            continue
        if current.op == "call_method":
            names.add(str(current.target))
        elif current.target is getattr:
            names.add(str(current.args[1]))
        pending.extend(current.all_input_nodes)
    return names


def _host_generators() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state()[2] if numpy is not None else None
