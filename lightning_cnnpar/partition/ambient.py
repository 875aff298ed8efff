"""Grad mode and autocast around a part of a forward, kept where they differ from those around the whole.

`torch.fx` records operations, not `with` blocks; without this, `with torch.no_grad():` or a disabled autocast inside a
forward would be lost.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Autocast:
    """Autocast's state for one kind of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ambient:
    """Grad mode and autocast states; `None` and absent ones are as around the whole network."""

    grad_enabled: bool | None
    autocast: tuple[Autocast, ...] = ()

    @classmethod
    def now(cls) -> "Ambient":
        """The state of this thread."""
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return cls(
            grad_enabled=torch.is_grad_enabled(),
            autocast=tuple(
                Autocast(
                    device_type=kind, enabled=torch.is_autocast_enabled(kind), dtype=torch.get_autocast_dtype(kind)
                )
                for kind in kinds
            ),
        )

    def relative_to(self, base: "Ambient") -> "Ambient":
        """What differs from `base`."""
        return Ambient(
            grad_enabled=None if self.grad_enabled == base.grad_enabled else self.grad_enabled,
            autocast=tuple(state for state in self.autocast if state not in base.autocast),
        )

    @property
    def is_plain(self) -> bool:
        """Whether nothing differs."""
        return self.grad_enabled is None and not self.autocast

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run a block in this state."""
        with contextlib.ExitStack() as stack:
            if self.grad_enabled is not None:
                stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for state in self.autocast:
                stack.enter_context(torch.autocast(state.device_type, dtype=state.dtype, enabled=state.enabled))
            yield

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, run in this state."""

        def in_ambient(*args: Any, **kwargs: Any) -> Any:
            with self.entered():
                return function(*args, **kwargs)

        return in_ambient
