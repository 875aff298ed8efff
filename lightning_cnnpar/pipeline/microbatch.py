"""Cutting a batch into microbatches, by rules that can't be wrong silently.

    leaf of the network's input             what a microbatch gets
    tensor, dimension 0 = batch size        its slice of dimension 0
    0-dimensional tensor, plain value       the same for every microbatch
    anything else (see `find_batch`)        the batch is not cut: one microbatch

A batch that can't be cut safely runs whole, and the reason is kept so that it can be told once.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from lightning_cnnpar.tree import TreeSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """How the inputs of one network call can be cut.

    Attributes:
        size: Samples in the batch; `None` if the inputs can't be cut.
        reason: Why they can't, empty if they can.
    """

    size: int | None
    reason: str = ""


def find_batch(leaves: Sequence[Any], spec: TreeSpec) -> Batch:
    """The batch size that the inputs of a network share.

    It is dimension 0 of the tensors outside of lists, and every tensor must have it. A list may hold one entry per
    sample, or batched tensors (a feature pyramid); only what is certain is cut: a list with as many entries as there
    are samples is not.

    Args:
        leaves: Leaves of `tree.flatten((args, kwargs))`.
        spec: Its spec.
    """
    seen = _Seen()
    remaining = iter(leaves)
    for entry in (child for container in spec.children for child in container.children):
        _look(entry, remaining, seen, in_list=False)
    if not seen.plain:
        return Batch(size=None, reason="no tensor outside of a list has a batch dimension")
    size = seen.plain.most_common(1)[0][0]
    if size <= 1:
        return Batch(size=size)
    for shape in seen.shapes:
        if shape[0] != size:
            return Batch(size=None, reason=f"an input has shape {shape}, but the batch seems to have {size} samples")
    if size in seen.lengths:
        return Batch(
            size=None, reason=f"a list or array in the inputs has {size} entries, as many as there are samples"
        )
    return Batch(size=size)


def split_sizes(batch_size: int, num_microbatches: int) -> tuple[int, ...]:
    """Sizes of the microbatches: as equal as possible, larger ones first, none empty.

    A batch of 8 in 3 gives 3, 3, 2; a batch of 2 in 4 gives 1, 1.
    """
    count = max(1, min(num_microbatches, batch_size))
    base, extra = divmod(batch_size, count)
    return (base + 1,) * extra + (base,) * (count - extra)


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Where each microbatch starts."""
    starts = [0]
    for size in sizes[:-1]:
        starts.append(starts[-1] + size)
    return tuple(starts)


def is_batched(leaf: Any, batch_size: int) -> bool:
    """Whether a leaf is cut along dimension 0."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch_size


def split_leaf(leaf: Any, batch_size: int, sizes: Sequence[int]) -> list[Any]:
    """A leaf for each microbatch: views of a batched tensor, otherwise the leaf itself."""
    if len(sizes) == 1 or not is_batched(leaf, batch_size):
        return [leaf] * len(sizes)
    return list(leaf.split(list(sizes)))


@dataclasses.dataclass
class _Seen:
    """What a walk over the inputs met: dimension 0 outside of lists, all shapes, lengths of lists and arrays."""

    plain: Counter[int] = dataclasses.field(default_factory=Counter)
    shapes: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    lengths: set[int] = dataclasses.field(default_factory=set)


def _look(spec: TreeSpec, leaves: Iterator[Any], seen: _Seen, *, in_list: bool) -> None:
    if spec.kind == "leaf":
        _look_at_leaf(next(leaves), seen, in_list=in_list)
        return
    is_list = spec.kind in ("list", "tuple")
    if is_list:
        seen.lengths.add(len(spec.children))
    for child in spec.children:
        _look(child, leaves, seen, in_list=in_list or is_list)


def _look_at_leaf(leaf: Any, seen: _Seen, *, in_list: bool) -> None:
    shape = getattr(leaf, "shape", ())
    if isinstance(leaf, Tensor) and shape:
        seen.shapes.append(tuple(shape))
        if not in_list:
            seen.plain[shape[0]] += 1
    elif isinstance(shape, tuple) and shape:
        seen.lengths.add(shape[0])
