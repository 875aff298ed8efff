"""Running parts of a network without data: shapes, costs, writes in place, and nothing else changes.

While a network is recorded, every value is computed beside it as a *fake* tensor, which has shape, dtype, device and
aliasing but no memory. So the recorder knows what a module returns, what it costs and what it overwrites. Parts whose
control flow depends on values can't run so; those run once on zeros with the real weights and copied buffers.

Nothing of this is visible afterwards: random generators, buffers and attributes of modules are as they were.
"""

import contextlib
import dataclasses
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from lightning_cnnpar import _compat, tree
from lightning_cnnpar.partition.foreign import is_foreign


class _Unknown:
    """The value of something that can't be computed without data."""

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = _Unknown()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What running something took.

    Attributes:
        flops: Floating-point operations of the forward.
        activation_bytes: Bytes of the tensors that it made.
        tensors: Names of the parameters and buffers that it touched.
    """

    flops: int = 0
    activation_bytes: int = 0
    tensors: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What running something gave.

    Attributes:
        value: The result, with fake tensors; `UNKNOWN` if it couldn't run.
        work: What it took.
        exact: Whether it ran on fake tensors; else the value may depend on data.
    """

    value: Any
    work: Work
    exact: bool


class _WorkCounter(_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the work of every operation that runs inside."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self.flops = 0
        self.activation_bytes = 0
        self.touched: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [arg for arg in args if isinstance(arg, Tensor)]
        for tensor in given:
            name = self._names.get(id(tensor))
            if name is not None:
                self.touched.add(name)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        old = {_compat.storage_key(tensor) for tensor in given}
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and _compat.storage_key(tensor) not in old:
                self.activation_bytes += tensor.numel() * tensor.element_size()
        return result


class AbstractNetwork:
    """A network on fake tensors.

    Args:
        root: The network. Placeholders of other ranks' tensors are fine.
        device: Where fake copies of such placeholders live.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self.root = root
        self._device = device
        self._mode = _compat.fake_tensor_mode()
        self._real = self._own_tensors(root)
        self._fakes = {name: self._fake_of(tensor) for name, tensor in self._real.items()}
        self._names = {id(fake): name for name, fake in self._fakes.items()}
        self._counter = _WorkCounter(self._names)
        self._writes: list[tuple[nn.Module, str, Any]] = []
        # While this is set, calls and attribute writes of modules are ours, not the user's forward being recorded.
        self.running = False

    @staticmethod
    def _own_tensors(root: nn.Module) -> dict[str, Tensor]:
        # A scripted module takes no substitutes; parts with one run on zeros.
        scripted = tuple(f"{name}." for name, m in root.named_modules() if isinstance(m, torch.jit.ScriptModule))
        named = [*root.named_parameters(), *root.named_buffers()]
        return {name: tensor for name, tensor in named if not name.startswith(scripted)}

    def _fake_of(self, tensor: Tensor) -> Tensor:
        if not is_foreign(tensor):
            fake: Tensor = self._mode.from_tensor(tensor)
            return fake
        with self._mode:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(empty, requires_grad=tensor.requires_grad)
            return empty

    def fake(self, value: Any) -> Any:
        """The same container with fake tensors."""
        return tree.map_tensors(
            lambda tensor: tensor if _compat.is_fake(tensor) else self._mode.from_tensor(tensor), value
        )

    def resized(self, fake: Tensor, batch_size: int) -> Tensor:
        """A fake tensor like `fake` with another first dimension."""
        with self._mode:
            return torch.empty((batch_size, *fake.shape[1:]), dtype=fake.dtype, device=fake.device)

    def within(self, body: Callable[[], Any], refuse_write: Callable[[nn.Module, str, Any], None] | None = None) -> Any:
        """Run `body` while the network holds fake tensors in place of its own.

        Args:
            body: What to run.
            refuse_write: Called before an attribute of a module is set outside of `run`.
        """
        original = nn.Module.__setattr__

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            if self.running:
                self._writes.append((module, name, vars(module).get(name, getattr(module, name, UNKNOWN))))
            elif refuse_write is not None:
                refuse_write(module, name, value)
            original(module, name, value)

        def patched() -> Any:
            with mock.patch.object(nn.Module, "__setattr__", set_attribute):
                return body()

        with preserved_generators(), torch.inference_mode(False), torch.enable_grad():
            return torch.func.functional_call(_Holder(self.root, patched), _prefixed(self._fakes), ())

    @property
    def flops(self) -> int:
        """Operations counted so far, also in the midst of a `run`."""
        return self._counter.flops

    @property
    def activation_bytes(self) -> int:
        """Bytes of the tensors made so far, also in the midst of a `run`."""
        return self._counter.activation_bytes

    def run(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        module: nn.Module | None = None,
        on_zeros: bool = True,
    ) -> Outcome:
        """Run `function` on fake tensors or, where that fails, on zeros.

        Args:
            function: What to run.
            args: Positional arguments, with fake tensors.
            kwargs: Keyword arguments, with fake tensors.
            module: The module that `function` calls, if it does.
            on_zeros: Whether to try zeros.
        """
        counter = self._counter
        before = counter.flops, counter.activation_bytes
        counter.touched = set()
        exact = True
        with self._isolated():
            try:
                with self._mode, counter:
                    value = function(*args, **kwargs)
            except Exception:
                exact = False
                value = self._run_on_zeros(function, args, kwargs, module) if on_zeros else UNKNOWN
        work = Work(
            flops=counter.flops - before[0],
            activation_bytes=counter.activation_bytes - before[1],
            tensors=frozenset(counter.touched),
        )
        return Outcome(value=value, work=work, exact=exact)

    def _run_on_zeros(self, function: Callable[..., Any], args: Any, kwargs: Any, module: nn.Module | None) -> Any:
        def real(tensor: Tensor) -> Tensor:
            name = self._names.get(id(tensor))
            if name is None:
                return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            if is_foreign(self._real[name]):
                raise ValueError(f"{name} is on another rank")
            return self._real[name].detach().clone()

        try:
            args, kwargs = tree.map_tensors(real, (args, kwargs))
            with torch.no_grad(), self._counter:
                if module is None:
                    return self.fake(function(*args, **kwargs))
                tensors = [*module.named_parameters(), *module.named_buffers()]
                held = {name: real(tensor) for name, tensor in tensors if id(tensor) in self._names}
                return self.fake(torch.func.functional_call(_Holder(module, function), _prefixed(held), args, kwargs))
        except Exception:
            return UNKNOWN

    @contextlib.contextmanager
    def _isolated(self) -> Iterator[None]:
        """Undo what user code inside does to modules and generators."""
        self.running, was_running = True, self.running
        start = len(self._writes)
        try:
            with preserved_generators():
                yield
        finally:
            for module, name, old in reversed(self._writes[start:]):
                _write_back(module, name, old)
            del self._writes[start:]
            self.running = was_running


class _Holder(nn.Module):
    """Gives `functional_call` a network's names and runs anything while the substitutes are in place."""

    def __init__(self, root: nn.Module, body: Callable[..., Any]) -> None:
        super().__init__()
        self.root = root
        self.__dict__["body"] = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["body"](*args, **kwargs)


def _prefixed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"root.{name}": tensor for name, tensor in tensors.items()}


def _write_back(module: nn.Module, name: str, old: Any) -> None:
    if old is UNKNOWN:
        with contextlib.suppress(AttributeError):
            delattr(module, name)
    else:
        setattr(module, name, old)


@contextlib.contextmanager
def preserved_generators() -> Iterator[None]:
    """Leave Python's, NumPy's and torch's generators as they were."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    torch_state = torch.random.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        torch.random.set_rng_state(torch_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)


def run_unhooked(m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a module without the user's hooks, which are not to see tensors without data; torch's own hooks stay."""
    if any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in _compat.module_hooks(m)):
        return m.forward(*args, **kwargs)
    return forward(*args, **kwargs)
