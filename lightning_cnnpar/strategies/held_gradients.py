"""Gradients that exist before Lightning expects them.

With a step for each microbatch, forward and backward passes take turns, and both are over when `training_step` returns.
Lightning then zeroes the gradients of the last step and asks for the backward. So the new gradients wait aside:

    training_step    gradients of the last step are dropped early ─► new ones arrive ─► held
    zero_grad        finds nothing to do
    backward         held ─► `parameter.grad`
"""

import contextlib
from collections.abc import Iterator
from typing import Any, final

from torch import Tensor


@final
class HeldGradients:
    """Holds the gradients of one step.

    Args:
        module: The LightningModule.
        zeroed: Whether Lightning will zero gradients before it asks for them. Otherwise new ones add up to those of the
            batches before, as they are.
    """

    def __init__(self, module: Any, *, zeroed: bool) -> None:
        self._module, self._zeroed = module, zeroed
        self._held: list[tuple[Tensor, Tensor]] = []

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect gradients inside of the block."""
        if not self._zeroed:
            yield
            return
        optimized = {
            id(p) for o in self._module.trainer.optimizers for group in o.param_groups for p in group["params"]
        }
        for parameter in self._module.parameters():
            # What no optimizer has is not zeroed either.
            if id(parameter) in optimized:
                parameter.grad = None
        yield
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                self._held.append((parameter, parameter.grad))
                parameter.grad = None

    def give_back(self) -> None:
        """Put them where optimizers look for them."""
        for parameter, gradient in self._held:
            parameter.grad = gradient
        self._held = []
