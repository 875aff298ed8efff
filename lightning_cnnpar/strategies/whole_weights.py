"""What callbacks see: whole weights when training ends, and their own copies of the module cut like the module."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn


class WholeWeights(Callback):
    """Makes the module whole before any other callback's `on_train_end`, so that those can read, average and export it.

    The strategy puts it in front of the user's callbacks for the time of a fit.

    Args:
        make_whole: Brings the values of all stages to this rank.
    """

    def __init__(self, make_whole: Callable[[], None]) -> None:
        self._make_whole = make_whole

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Bring the values of all stages to this rank."""
        self._make_whole()


def modules_of_callbacks(callbacks: Iterable[Any]) -> Iterator[nn.Module]:
    """What callbacks keep in their attributes: metrics, averaged weights, teachers."""
    for callback in callbacks:
        yield from (value for value in vars(callback).values() if isinstance(value, nn.Module))


def module_copies(callbacks: Iterable[Any], module: nn.Module) -> list[nn.Module]:
    """Copies of the user's module that callbacks keep (weight averaging): same class, same names, other tensors."""
    names = {name for name, _ in module.named_parameters()}
    found: dict[int, nn.Module] = {}
    for value in modules_of_callbacks(callbacks):
        if value is module:
            continue
        for candidate in value.modules():
            same_class = type(candidate) is type(module) and candidate is not module
            if same_class and {name for name, _ in candidate.named_parameters()} == names:
                found[id(candidate)] = candidate
    return list(found.values())


def compare_whole_values(callbacks: Iterable[Any], whole: Callable[[], AbstractContextManager[Any]]) -> list[Any]:
    """Let finetuning callbacks see whole parameters: they ask by value which ones an optimizer has already.

    Args:
        callbacks: Of the Trainer.
        whole: A context in which parameters have all their values.

    Returns:
        The callbacks that were changed, for `compare_as_before`.
    """
    changed = [callback for callback in callbacks if isinstance(callback, BaseFinetuning)]
    for callback in changed:
        callback.on_train_epoch_start = _inside(callback.on_train_epoch_start, whole)  # type: ignore[method-assign]
    return changed


def compare_as_before(callbacks: Iterable[Any]) -> None:
    """Undo `compare_whole_values`."""
    for callback in callbacks:
        vars(callback).pop("on_train_epoch_start", None)


def _inside(hook: Callable[..., None], whole: Callable[[], AbstractContextManager[Any]]) -> Callable[..., None]:
    @functools.wraps(hook)
    def on_train_epoch_start(trainer: Any, pl_module: Any) -> None:
        with whole():
            hook(trainer, pl_module)

    return on_train_epoch_start
