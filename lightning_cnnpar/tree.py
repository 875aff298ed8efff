"""Nested containers of a network's inputs and outputs, flattened and put back.

Batches and outputs come as tensors inside tuples, lists, dictionaries, named tuples and dataclasses. The pipeline cuts,
sends and joins the *leaves*; this module takes a container apart and builds an equal one from other leaves.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

Leaves = list[Any]


@dataclasses.dataclass(frozen=True)
class TreeSpec:
    """The shape of a container: what `unflatten` needs beside the leaves.

    Two containers have equal specs exactly when they have the same nesting, keys and types; specs are hashable and can
    be pickled, so they serve as cache keys and travel between ranks.

    Attributes:
        kind: "leaf", or the kind of container.
        container: The container's class; `None` for a leaf.
        keys: Dictionary keys or dataclass field names.
        children: Specs of the entries, in order.
    """

    kind: str
    container: type | None = None
    keys: tuple[Any, ...] = ()
    children: tuple["TreeSpec", ...] = ()

    @property
    def num_leaves(self) -> int:
        """How many leaves `unflatten` takes."""
        return 1 if self.kind == "leaf" else sum(child.num_leaves for child in self.children)


LEAF = TreeSpec("leaf")


def flatten(tree: Any) -> tuple[Leaves, TreeSpec]:
    """Take a container apart into its leaves, in order, and its spec.

    Containers are `tuple` (named ones too), `list`, mappings (including `OrderedDict`, `defaultdict` and the like that
    can be built from a dictionary) and dataclass instances. Everything else is a leaf, `None` included.
    """
    leaves: Leaves = []
    return leaves, _flatten_into(tree, leaves)


def unflatten(spec: TreeSpec, leaves: Sequence[Any]) -> Any:
    """Build the container that `spec` describes from `leaves`."""
    if len(leaves) != spec.num_leaves:
        raise ValueError(f"This container takes {spec.num_leaves} leaves, {len(leaves)} were given.")
    return _build(spec, iter(leaves))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to every leaf and keep the containers."""
    leaves, spec = flatten(tree)
    return unflatten(spec, [function(leaf) for leaf in leaves])


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply `function` to every tensor leaf; other leaves stay as they are."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def entries(tree: Any) -> Sequence[Any] | None:
    """What a container holds, one level deep; `None` for a leaf."""
    described = _describe(tree)
    return None if described is None else described[2]


def rebuild(tree: Any, entries: Sequence[Any]) -> Any:
    """A container like `tree` with other entries, one level deep."""
    described = _describe(tree)
    if described is None:
        raise ValueError(f"{type(tree).__name__} is no container.")
    kind, keys, _ = described
    return _build(TreeSpec(kind, type(tree), keys, (LEAF,) * len(entries)), iter(entries))


def _flatten_into(tree: Any, leaves: Leaves) -> TreeSpec:
    described = _describe(tree)
    if described is None:
        leaves.append(tree)
        return LEAF
    kind, keys, entries = described
    return TreeSpec(kind, type(tree), keys, tuple(_flatten_into(entry, leaves) for entry in entries))


def _describe(tree: Any) -> tuple[str, tuple[Any, ...], Sequence[Any]] | None:
    if isinstance(tree, tuple):
        return ("namedtuple" if hasattr(tree, "_fields") else "tuple"), (), tree
    if isinstance(tree, list):
        return "list", (), tree
    if isinstance(tree, Mapping):
        return "mapping", tuple(tree.keys()), list(tree.values())
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = tuple(field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name))
        return "dataclass", names, [getattr(tree, name) for name in names]
    return None


def _build(spec: TreeSpec, leaves: Any) -> Any:
    if spec.kind == "leaf":
        return next(leaves)
    entries = [_build(child, leaves) for child in spec.children]
    container = spec.container
    assert container is not None
    if spec.kind == "namedtuple":
        return container(*entries)
    if spec.kind == "mapping":
        return _build_mapping(container, dict(zip(spec.keys, entries, strict=True)))
    if spec.kind == "dataclass":
        return _build_dataclass(container, dict(zip(spec.keys, entries, strict=True)))
    return container(entries)


def _build_mapping(container: type, entries: dict[Any, Any]) -> Any:
    if container is dict:
        return entries
    try:
        return container(entries)
    except TypeError:
        # `defaultdict` and its like take something else first; an ordinary dictionary holds the same items.
        return entries


def _build_dataclass(container: type, fields: dict[str, Any]) -> Any:
    # Without `__init__`: fields with `init=False`, keyword-only fields and `__post_init__` all come out as they went
    # in.
    built: Any = object.__new__(container)
    for name, value in fields.items():
        object.__setattr__(built, name, value)
    return built
