"""Activations that are dropped after a forward and computed again for the backward.

Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, arXiv:1604.06174.

    forward     what autograd would save ─► a number each
    restore     the same forward again, same random numbers, same autocast ─► the values under those numbers
    backward    number ─► value

The graph of the first forward is the one that gradients go through: it has the right shapes and flags, and no values.
Only what the stage received and what it was given stay in memory.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_cnnpar.pipeline.ambient import Ambient

T = TypeVar("T")


@final
class Recomputation:
    """The saved tensors of one forward of one stage.

    Args:
        root: The network.
        modules: Names of the submodules that the stage calls.
        device: Where it computes.
    """

    def __init__(self, root: nn.Module, modules: Iterable[str], device: torch.device) -> None:
        self._root, self._modules, self._device = root, tuple(modules), device
        self._count = 0
        self._values: list[Tensor] | None = None
        self._again: Callable[[], Any] | None = None
        self._ambient: Ambient | None = None

    def run(self, forward: Callable[[], T], drawing: Callable[[], contextlib.AbstractContextManager[None]]) -> T:
        """Run a forward of which nothing is kept.

        Args:
            forward: The stage's forward; it is called again for the backward.
            drawing: Opens a block in which the forward draws the random numbers that it draws now.
        """
        self._ambient = Ambient.capture(self._device)

        def again() -> None:
            with drawing():
                forward()

        self._again = again
        with saved_tensors_hooks(self._number, self._value):
            return forward()

    def restore(self) -> None:
        """Compute the values again, for one backward.

        Raises:
            RuntimeError: If the second forward does not save as many tensors as the first one.
        """
        assert self._again is not None
        assert self._ambient is not None
        values: list[Tensor] = []

        def keep(value: Tensor) -> Tensor:
            values.append(value.detach())
            return value

        with (
            torch.enable_grad(),
            self._ambient.applied(),
            self._unchanged_buffers(),
            saved_tensors_hooks(keep, lambda value: value),
        ):
            self._again()
        if len(values) != self._count:
            raise RuntimeError(
                f"Computing {', '.join(self._modules[:3])} ... again for the backward saved {len(values)} tensors, the"
                f" first time it was {self._count}: the forward is not the same twice. Don't let it depend on state"
                f" that it changes (counters, caches), or use `activation_checkpointing='never'`."
            )
        self._values = values

    def drop(self) -> None:
        """Forget the values after the backward."""
        self._values = None

    def _number(self, value: Tensor) -> int:
        self._count += 1
        return self._count - 1

    def _value(self, number: int) -> Tensor:
        if self._values is None:
            self.restore()
        assert self._values is not None
        return self._values[number]

    @contextlib.contextmanager
    def _unchanged_buffers(self) -> Iterator[None]:
        """Buffers that a forward moves on (power iterations, running averages) are moved once; BatchNorm's apart."""
        kept = [(buffer, buffer.clone()) for buffer in self._buffers()]
        try:
            yield
        finally:
            for buffer, value in kept:
                buffer.data.copy_(value)

    def _buffers(self) -> Iterator[Tensor]:
        for name in self._modules:
            for module in self._root.get_submodule(name).modules():
                if module.training and not isinstance(module, _BatchNorm):
                    yield from module.buffers(recurse=False)
