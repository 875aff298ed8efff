"""Code that can be left in the middle and gone on with later, in the same thread.

    driver      resume ──────────────┐        ┌── resume(outputs) ──────┐
                                     ▼        │                         ▼
    user's step                preprocessing, network(x) ─ suspend    loss, log, return

Greenlets do the switching: the user's code needs no `await`, and no thread that would have its own CUDA stream, OpenMP
team or event loop. What torch keeps per thread (autocast, grad mode) and the random generators are exchanged at each
switch, so that several steps can be under way without seeing each other.
"""

from collections.abc import Callable
from typing import Any, Protocol, final

import torch
from greenlet import getcurrent, greenlet

from lightning_cnnpar.pipeline.ambient import Ambient


class Generators(Protocol):
    """Random states of one coroutine."""

    def enter(self) -> None:
        """Make them the present ones."""

    def leave(self) -> None:
        """Note them, and give the outside's back."""


@final
class Coroutine:
    """A function that may suspend itself.

    Args:
        function: Takes no arguments.
        device: Whose autocast state belongs to it, beside the CPU's.
        generators: Its random states; `None` to share those of the outside.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device, generators: Generators | None = None) -> None:
        self._device, self._generators = device, generators
        self._greenlet = greenlet(function)
        self._ambient: Ambient | None = None
        self._begun = False

    @property
    def finished(self) -> bool:
        """Whether the function has returned."""
        return self._begun and bool(self._greenlet.dead)

    @property
    def ambient(self) -> Ambient:
        """Autocast and grad mode where it is suspended."""
        assert self._ambient is not None
        return self._ambient

    def resume(self, message: Any = None) -> Any:
        """Go on until the function suspends itself or returns.

        Args:
            message: What `suspend` returns inside; nothing at the start.

        Returns:
            What was given to `suspend`, or what the function returned.

        Raises:
            Exception: What the function raised.
        """
        outside = Ambient.capture(self._device)
        if self._ambient is not None:
            self._ambient.apply()
        if self._generators is not None:
            self._generators.enter()
        try:
            if self._begun:
                return self._greenlet.switch(message)
            self._begun = True
            return self._greenlet.switch()
        finally:
            if self._generators is not None:
                self._generators.leave()
            self._ambient = Ambient.capture(self._device)
            outside.apply()

    def close(self) -> None:
        """Leave the function where it is suspended, as an exit would."""
        if self._begun and not self._greenlet.dead:
            outside = Ambient.capture(self._device)
            try:
                self._greenlet.throw()
            finally:
                outside.apply()


def suspend(request: Any) -> Any:
    """Hand `request` to who resumed this coroutine, and wait for the message of the next `resume`."""
    parent = getcurrent().parent
    assert parent is not None
    return parent.switch(request)
