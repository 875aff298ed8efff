"""Loaders whose iteration is changed and which otherwise stay what they are.

A `DataLoader` (or a user's subclass) is copied shallowly and the copy's class is a subclass made on the spot, so
`isinstance`, attributes, `len` and anything that the user's class adds go on working, and nothing is constructed anew.
Other iterables get a plain wrapper. Either way iteration passes through *layers*, innermost first:

    iter(loader) ──► user's __iter__ ──► layer ──► layer ──► batches
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

Start = Callable[[], Iterator[Any]]
"""Begins an epoch of the loader below."""

_LAYERS = "_cnnpar_layers"


class Layer(ABC):
    """Something that happens to batches between the user's loader and its consumer."""

    @abstractmethod
    def iterate(self, start: Start, loader: Any) -> Iterator[Any]:
        """Begin an epoch, now: what `start` draws from random generators is drawn when `iter(loader)` is called."""


def add_layer(loader: Any, layer: Layer) -> Any:
    """A loader like `loader` (which stays as it is) whose iteration passes through `layer` last."""
    if isinstance(loader, LayeredIterable):
        return LayeredIterable(loader.iterable, (*loader.layers, layer))
    if not isinstance(loader, DataLoader):
        return LayeredIterable(loader, (layer,))
    cls: Any = type(loader)
    return _clone(loader, layered_class(cls), {_LAYERS: (*layers_of(loader), layer)})


def layers_of(loader: Any) -> tuple[Layer, ...]:
    """The layers of a loader, innermost first."""
    if isinstance(loader, LayeredIterable):
        return loader.layers
    return loader.__dict__.get(_LAYERS, ()) if isinstance(loader, _LayeredLoader) else ()


def copy_loader(loader: Any, **attributes: Any) -> Any:
    """A shallow copy of a `DataLoader` with other `attributes`, also those that can't be set once it is built."""
    return _clone(loader, type(loader), attributes)


class LayeredIterable:
    """Any iterable that isn't a `DataLoader`, with layers."""

    def __init__(self, iterable: Any, layers: tuple[Layer, ...]) -> None:
        self.iterable = iterable
        self.layers = layers

    def __iter__(self) -> Iterator[Any]:
        return _through(self.layers, functools.partial(iter, self.iterable), self)

    def __len__(self) -> int:
        return len(self.iterable)

    def __getattr__(self, name: str) -> Any:
        if name in ("iterable", "layers"):
            # Not there yet while being copied or unpickled.
            raise AttributeError(name)
        return getattr(self.iterable, name)


class _LayeredLoader:
    """Comes first among the bases of a copied loader's class."""

    def __iter__(self) -> Iterator[Any]:
        start: Start = super().__iter__  # type: ignore[misc]
        return _through(layers_of(self), start, self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle (or deep copy) is of the user's loader: groups and made-up classes don't travel.
        plain = _clone(self, type(self).__mro__[2], {})
        plain.__dict__.pop(_LAYERS, None)
        return itself, (plain,)


def itself(value: Any) -> Any:
    """`value`: for objects that are pickled as another one."""
    return value


@functools.cache
def layered_class(base: Any) -> Any:
    """The subclass of a loader class that goes through layers; the same one each time."""
    if issubclass(base, _LayeredLoader):
        return base
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (_LayeredLoader, base), names)


def _through(layers: tuple[Layer, ...], start: Start, loader: Any) -> Iterator[Any]:
    for layer in layers:
        start = functools.partial(layer.iterate, start, loader)
    return start()


def _clone(loader: Any, cls: Any, attributes: dict[str, Any]) -> Any:
    # Not `copy.copy`: whatever the user's class does when it is copied or built has been done.
    clone: Any = object.__new__(cls)
    # The clone starts workers of its own.
    clone.__dict__.update({**loader.__dict__, "_iterator": None, **attributes})
    return clone
