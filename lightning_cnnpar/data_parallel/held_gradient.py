"""What `parameter.grad` is while the gradient exists in pieces only, and the parameter is whole.

A piece does not have the shape of the parameter, so it waits in its slot. The optimizer's `zero_grad` has to be able to
drop it all the same, and code that asks whether there is a gradient has to get a yes. So a stand-in takes its place:

    backward ─► pieces ─► next forward: parameter.grad = HeldGradient ─┬─ backward ─► pieces add up
                                                                      └─ zero_grad ─► parameter.grad = None: dropped
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_cnnpar._compat import disable_torch_function
from lightning_cnnpar.data_parallel.shards import Slot

_HARMLESS = frozenset({"__get__", "__set__", "requires_grad_", "detach_"})


class HeldGradientError(RuntimeError):
    """Code needed the values of a gradient that is cut over replicas, at a moment when only its pieces exist."""


class HeldGradient(Tensor):
    """A gradient in pieces: everything but its values.

    Attributes:
        slot: Whose it is.
    """

    slot: Slot

    @staticmethod
    def of(slot: Slot) -> "HeldGradient":
        """A stand-in for `slot.gradient`."""
        with disable_torch_function():
            held = slot.hollow.as_subclass(HeldGradient)
        held.slot = slot
        return held

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Zero the piece where the whole would be zeroed; tell shape and flags; refuse the rest."""
        name = getattr(func, "__name__", str(func))
        if name in _HARMLESS:
            with disable_torch_function():
                return func(*args, **(kwargs or {}))
        if name in ("zero_", "_foreach_zero_"):
            for tensor in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                _zero(tensor)
            return args[0]
        held = next(arg for arg in args if isinstance(arg, HeldGradient)) if args else None
        raise HeldGradientError(
            f"The gradient of {held.slot.name if held is not None else 'a parameter'!r} was used by `{name}` during a"
            " forward, when it exists in pieces on the replicas (zero_stage). Between the backward pass and the"
            " optimizer's step, `parameter.grad` is this rank's piece. Read it there, in `on_after_backward` or"
            " `on_before_optimizer_step`."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Name and shape instead of values."""
        return f"HeldGradient({self.slot.name!r}, shape={tuple(self.shape)})"


def _zero(tensor: Tensor) -> None:
    if not isinstance(tensor, HeldGradient):
        tensor.zero_()
    elif tensor.slot.gradient is not None:
        tensor.slot.gradient.zero_()
