"""What of the process's state changes the numbers that code gives: autocast, grad mode, the default type."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ambient:
    """Autocast, grad mode and default type at one moment.

    Attributes:
        grad: Whether gradients are recorded.
        dtype: Type of new floating-point tensors.
        autocast: By device type: whether it is on, and to which type it casts.
        caches: Whether casts of weights are remembered within a region.
    """

    grad: bool
    dtype: torch.dtype
    autocast: Mapping[str, tuple[bool, torch.dtype]]
    caches: bool

    @classmethod
    def capture(cls, device: torch.device) -> "Ambient":
        """The present state, of the CPU and of `device`."""
        types = dict.fromkeys(("cpu", device.type))
        return cls(
            grad=torch.is_grad_enabled(),
            dtype=torch.get_default_dtype(),
            autocast={kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types},
            caches=torch.is_autocast_cache_enabled(),
        )

    def apply(self) -> None:
        """Make it the present state."""
        torch.set_grad_enabled(self.grad)
        torch.set_default_dtype(self.dtype)
        for kind, (enabled, dtype) in self.autocast.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.caches)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Run a block in this state; casts of weights that it makes are not remembered beyond it."""
        with contextlib.ExitStack() as stack:
            for kind, (enabled, dtype) in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.caches))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)
            yield
