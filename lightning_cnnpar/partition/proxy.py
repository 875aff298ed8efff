"""Stand-ins for values while a network is recorded.

They behave like `torch.fx` proxies and know more: beside each stands a value without data, so that they can tell their
type, be iterated, measured and written into, and answer questions about sizes.
"""

import dis
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, fx

from lightning_cnnpar.partition.abstract import UNKNOWN

_ASKS_FOR_CLASS = frozenset({"isinstance", "__class__", "issubclass"})


class NetworkProxy(fx.Proxy):
    """A value of the network.

    `isinstance(x, torch.Tensor)` is true for stand-ins of tensors, since forwards ask that. Only Python code that asks
    so is told: compiled code that believed it would read memory that isn't there.
    """

    @property
    def __class__(self) -> type:
        if not _ASKS_FOR_CLASS.intersection(sys._getframe(1).f_code.co_names):
            return type(self)
        return Tensor if isinstance(self.node.meta.get("value"), Tensor) else type(self)

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("The class of a recorded value can't be changed.")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return NetworkAttribute(self, name)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __iter__(self) -> Iterator[Any]:
        value = self.node.meta.get("value", UNKNOWN)
        if isinstance(value, (tuple, list)):
            return iter([self._entry(i) for i in range(len(value))])
        if value is UNKNOWN:
            # How many there are is read off the caller's `a, b = x`.
            return iter([self._entry(i) for i in range(_unpacked(inspect.currentframe()))])
        return iter([self._entry(i) for i in range(len(self))])

    def _entry(self, index: int) -> Any:
        return self.tracer.create_proxy("call_function", operator.getitem, (self, index), {})

    def _decided(self) -> Any:
        tracer: Any = self.tracer
        return tracer.concretize(self)

    def __len__(self) -> int:
        value = self.node.meta.get("value", UNKNOWN)
        if isinstance(value, Tensor):
            return int(self.size(0))
        if value is UNKNOWN:
            raise fx.proxy.TraceError("`len` of a value that isn't known without running the network")
        return len(value)

    def __contains__(self, item: Any) -> bool:
        return any(bool(item == entry) for entry in self)

    def __int__(self) -> int:
        return int(self._decided())

    def __index__(self) -> int:
        return operator.index(self._decided())

    def __float__(self) -> float:
        return float(self._decided())


class NetworkAttribute(NetworkProxy):
    """`x.name`, recorded when it turns out not to be a method call."""

    def __init__(self, root: NetworkProxy, attr: str) -> None:
        self.root = root
        self.attr = attr
        self.tracer = root.tracer
        self._node: fx.Node | None = None

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        """The recorded read."""
        if self._node is None:
            self._node = self.tracer.create_proxy("call_function", getattr, (self.root, self.attr), {}).node
        return self._node

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record a method call."""
        return self.tracer.create_proxy("call_method", self.attr, (self.root, *args), kwargs)


def _unpacked(frame: Any) -> int:
    """How many names the caller of `__iter__` unpacks into."""
    caller = frame.f_back
    for instruction in dis.get_instructions(caller.f_code):
        if instruction.offset == caller.f_lasti and instruction.opname == "UNPACK_SEQUENCE":
            return int(instruction.argval)
    raise fx.proxy.TraceError("a loop over a value that isn't known without running the network")


def _in_place(name: str) -> Callable[[NetworkProxy, Any], Any]:
    written, computed = (
        getattr(operator, name),
        getattr(operator, name[1:] if name != "iand" and name != "ior" else name),
    )

    def record(self: NetworkProxy, other: Any) -> Any:
        # `size += 1` makes another number; `x += y` writes into the tensor, which all its other names see.
        function = written if isinstance(self, Tensor) else computed
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return record


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(NetworkProxy, f"__i{_name}__", _in_place(f"i{_name}"))
