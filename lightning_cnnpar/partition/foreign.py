"""Placeholders for the parameters and buffers that live on another rank of the replica.

After the cut a rank keeps its own stage; everything of the other stages is replaced by a `Foreign` tensor on the `meta`
device: name, shape, dtype and `requires_grad` stay, the memory is gone. Optimizers, parameter groups, freezing
callbacks and `state_dict` keep their structure, since the placeholder stands where the parameter stood.

What user code may do with a placeholder follows one rule: *foreign values stay foreign*.

    foreign.requires_grad_(False)      works, it is only a flag
    foreign.copy_(foreign)             nothing happens here; the owner does it with the real values
    foreign * 0.9 + foreign * 0.1      another placeholder
    loss + foreign.norm()              ForeignTensorError: names the parameter, its rank and the way out
    foreign.item(), print the values   ForeignTensorError

So code that treats every parameter alike (weight averaging, weight decay on the parameter itself) does on every rank
exactly its own part, and code that would mix in a value that is not here can't go on silently.
"""

import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cnnpar._compat import disable_torch_function

# Attribute reads that tell nothing about the values.
_GETTER = "__get__"
# Methods that end in an underscore and still don't write values.
_FLAG_METHODS = frozenset({"requires_grad_", "detach_", "share_memory_", "retain_grad"})
_VALUE_METHODS = frozenset(
    {
        "item",
        "tolist",
        "numpy",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "__array__",
        "__contains__",
        "backward",
    }
)
# The last one is Lightning's utility to log norms.
_NORMS = frozenset({"clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_", "grad_norm"})


class ForeignTensorError(RuntimeError):
    """Code on one rank needed the values of a parameter or buffer that another rank of the replica holds."""


class Foreign(Tensor):
    """A tensor of another stage: everything but its values.

    Attributes:
        foreign_name: Dotted name in the LightningModule, or what it was computed from.
        owner: Index in the replica of the rank that holds the values.
    """

    foreign_name: str
    owner: int

    @staticmethod
    def of(tensor: Tensor, name: str, owner: int) -> "Foreign":
        """A placeholder for `tensor`, a parameter where that is one."""
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        placeholder = _wrap(empty, name, owner)
        if isinstance(tensor, nn.Parameter):
            placeholder._is_param = True  # what `isinstance(x, nn.Parameter)` looks at
            with disable_torch_function():
                placeholder.requires_grad_(tensor.requires_grad)
        return placeholder

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Carry out the rule of this module for one call."""
        return _dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> "Foreign":
        copied = Foreign.of(self, self.foreign_name, self.owner)
        if not isinstance(self, nn.Parameter):
            copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _error(self, "can't be saved or sent from here")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Name and place instead of values."""
        return f"Foreign({self.foreign_name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, on rank {self.owner})"


def is_foreign(value: Any) -> bool:
    """Whether `value` is a placeholder for a tensor of another stage."""
    return isinstance(value, Foreign)


def _wrap(tensor: Tensor, name: str, owner: int) -> Foreign:
    with disable_torch_function():
        wrapped = tensor.as_subclass(Foreign)
    wrapped.foreign_name = name
    wrapped.owner = owner
    return wrapped


def _error(tensor: Foreign, what: str) -> ForeignTensorError:
    return ForeignTensorError(
        f"{tensor.foreign_name!r} (shape {tuple(tensor.shape)}) {what}: its values are on rank {tensor.owner} of the"
        f" replica, which holds that pipeline stage. Code that reads parameters of the network outside of the network's"
        f" own forward sees only its own stage. If the step reads it beside a network that it calls, name that network:"
        f" `HybridStrategy(network=...)`; what is around it then stays on every rank. Otherwise use"
        f" `with trainer.strategy.whole_module():` to read weights, `trainer.strategy.clip_grad_norm_(...)` for"
        f" gradient norms, the optimizer's `weight_decay` for an L2 penalty, or compute the term inside the network's"
        " forward."
    )


def _dispatch(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    foreign = next(iter(_foreign_in(itertools.chain(args, kwargs.values()))))
    if name == _GETTER:
        return _get_attribute(func, args, foreign)
    if name == "equal":
        # `torch.equal(p, q)` is how Lightning's finetuning asks whether an optimizer has a parameter already.
        return args[0] is args[1]
    if name in _VALUE_METHODS:
        raise _error(foreign, f"was asked for its values by `{name}`")
    if name.startswith("_foreach") and isinstance(args[0], (list, tuple)):
        return _foreach(func, name, args, kwargs, foreign)
    if name in _FLAG_METHODS or name == "__set__":
        with disable_torch_function():
            return func(*args, **kwargs)
    if _is_in_place(name):
        return _in_place(func, name, args, foreign)
    _refuse_mixing(name, args, kwargs, foreign)
    if name in {"to", "cpu", "cuda", "clone", "contiguous", "pin_memory"}:
        return _moved(foreign, args, kwargs)
    with disable_torch_function():
        result = func(*args, **kwargs)
    return _taint(result, foreign)


def _get_attribute(func: Callable[..., Any], args: Sequence[Any], foreign: Foreign) -> Any:
    if getattr(getattr(func, "__self__", None), "__name__", "") == "grad":
        _warn_about_local_norm()
    with disable_torch_function():
        result = func(*args)
    return _taint(result, foreign)


def _foreach(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], foreign: Foreign) -> Any:
    """Run a list operation on the entries that are here; entries that are all foreign drop out of in-place ones."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    rows = list(zip(*lists, strict=True))
    kept = [i for i, row in enumerate(rows) if not any(map(is_foreign, row))]
    for i, row in enumerate(rows):
        if i not in kept and not all(is_foreign(entry) for entry in row if isinstance(entry, Tensor)):
            raise _error(foreign, f"is combined with a tensor of this rank by `{name}`")
    if not name.endswith("_"):
        raise _error(foreign, f"was given to `{name}`")
    if kept:
        picked = [[arg[i] for i in kept] if isinstance(arg, (list, tuple)) else arg for arg in args]
        func(*picked, **kwargs)
    return None


def _in_place(func: Any, name: str, args: Sequence[Any], foreign: Foreign) -> Any:
    target = args[0]
    if not isinstance(target, Foreign):
        raise _error(foreign, f"is written into a tensor of this rank by `{name}`")
    # A write with foreign or plain values: the owner does it with the real ones.
    return target


def _is_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name.endswith("__"))


def _moved(foreign: Foreign, args: Sequence[Any], kwargs: dict[str, Any]) -> Foreign:
    """`to` another device or dtype: the placeholder stays on `meta` and takes the dtype."""
    if not isinstance(
        args[0], Foreign
    ):  # real.to(foreign): only dtype and device are read, and they are not useful here
        raise _error(foreign, "was named as the device to move a tensor to")
    wanted = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.dtype)]
    with disable_torch_function():
        moved = torch.empty_like(args[0].detach(), dtype=wanted[0] if wanted else None, device="meta")
    return _wrap(moved, foreign.foreign_name, foreign.owner)


def _refuse_mixing(name: str, args: Sequence[Any], kwargs: dict[str, Any], foreign: Foreign) -> None:
    for value in _tensors_in(itertools.chain(args, kwargs.values())):
        if not isinstance(value, Foreign) and value.device.type != "meta":
            raise _error(foreign, f"is combined with a tensor of this rank by `{name}`")


def _taint(result: Any, foreign: Foreign) -> Any:
    if isinstance(result, Foreign):
        if not hasattr(result, "foreign_name"):
            result.foreign_name, result.owner = foreign.foreign_name, foreign.owner
        return result
    if isinstance(result, Tensor):
        return _wrap(result, foreign.foreign_name, foreign.owner)
    if isinstance(result, (tuple, list)) and any(isinstance(entry, Tensor) for entry in result):
        return type(result)(_taint(entry, foreign) for entry in result)
    return result


def _tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def _foreign_in(values: Iterable[Any]) -> Iterable[Foreign]:
    return (value for value in _tensors_in(values) if isinstance(value, Foreign))


def _warn_about_local_norm() -> None:
    """A norm by hand over `parameters()` sees the gradients of one stage only; say so once, at the place."""
    frame = sys._getframe(4)
    for _ in range(4):
        if frame is None:
            return
        if frame.f_code.co_name in _NORMS:
            warnings.warn(
                f"{frame.f_code.co_name} was called over parameters of which some are on other pipeline stages:"
                " it sees the gradients of this stage only, so the norm is too small. Use"
                " `Trainer(gradient_clip_val=...)`, `self.clip_gradients(...)` or"
                " `trainer.strategy.clip_grad_norm_(parameters, max_norm)`, which returns the norm of all stages.",
                stacklevel=6,
            )
            return
        frame = frame.f_back  # type: ignore[assignment]
