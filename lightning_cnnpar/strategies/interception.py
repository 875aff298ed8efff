"""How a call of a submodule inside the user's step becomes a collective of the replica.

`forward` of every module with parameters is shadowed by an `InterceptedForward` on the instance, so that hooks,
`self(x)`, `self.model(x)` and even `self.model.forward(x)` all reach it, and the class of the module stays what it was.
Outside of a run, inside of a network, while tracing and in a deep copy it is the original forward.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol

from torch import nn

from lightning_cnnpar._compat import in_backward


class CallHandler(Protocol):
    """Who decides what an outermost call of a module does."""

    @property
    def intercepts(self) -> bool:
        """Whether calls are to be decided on now."""

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Carry out the call."""


class InterceptedForward:
    """Stands in for `module.forward`.

    Args:
        module: The module whose forward it is.
        handler: Who decides.
    """

    def __init__(self, module: nn.Module, handler: CallHandler) -> None:
        self._module = module
        self._handler = handler
        # A forward that somebody else shadowed on the instance stays the one that runs.
        self._shadowed = module.__dict__.get("forward")

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that runs without us."""
        shadowed: Callable[..., Any] | None = self._shadowed
        return shadowed if shadowed is not None else MethodType(type(self._module).forward, self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module: through the handler if this is an outermost call of a run."""
        if not self._handler.intercepts or in_backward():
            return self.original(*args, **kwargs)
        return self._handler.call(self._module, self.original, args, kwargs)

    def remove(self) -> None:
        """Give the module its own forward back."""
        if self._module.__dict__.get("forward") is not self:
            return
        if self._shadowed is None:
            del self._module.__dict__["forward"]
        else:
            self._module.__dict__["forward"] = self._shadowed

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        # A copy of the module is nobody's stage: it gets a plain bound method of its own.
        copied = memo.get(id(self._module), self._module)
        return MethodType(type(copied).forward, copied)

    def __reduce__(self) -> Any:
        return getattr, (self._module, "forward")


def intercept(root: nn.Module, handler: CallHandler) -> list[InterceptedForward]:
    """Shadow the forward of `root` and of every submodule that has parameters."""
    installed = []
    for module in root.modules():
        if next(module.parameters(), None) is None:
            continue
        shadow = InterceptedForward(module, handler)
        module.__dict__["forward"] = shadow
        installed.append(shadow)
    return installed
