"""Cutting what a step is given, by sample: for schedules that run the step once for each microbatch.

    tensor, dimension 0 = batch size               its slice
    list with one entry per sample                 its slice (images of a detector, captions, targets as dictionaries)
    other containers                               cut entry by entry
    0-dimensional tensor, plain value              the same for every microbatch
    anything else, or anything uncertain           the batch is not cut, and the reason is told

The batch size is dimension 0 of the tensors outside of lists; without any, the length of the lists that can only hold
one entry per sample.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_cnnpar import tree
from lightning_cnnpar.pipeline.microbatch import split_sizes

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """A batch in microbatches.

    Attributes:
        parts: What each microbatch gets.
        sizes: Samples in each.
        reason: Why it is not cut, where it is not.
    """

    parts: Sequence[Any]
    sizes: tuple[int, ...]
    reason: str = ""


def cut_batch(batch: Any, num_microbatches: int) -> Cut:
    """Cut a batch into `num_microbatches`, or fewer if it has fewer samples."""
    size, reason = find_size(batch)
    if size is None:
        return Cut(parts=[batch], sizes=(1,), reason=reason)
    sizes = split_sizes(size, num_microbatches)
    if len(sizes) == 1:
        return Cut(parts=[batch], sizes=sizes)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    spans = [slice(start, start + length) for start, length in zip(starts, sizes, strict=True)]
    return Cut(parts=[_slice(batch, size, span, top=True) for span in spans], sizes=sizes)


def find_size(batch: Any) -> tuple[int | None, str]:
    """How many samples a batch has; `None` and a reason if that is not certain."""
    seen = _Seen()
    _look(batch, seen, top=True)
    if seen.foreign:
        return None, f"it holds a {seen.foreign[0]}, which can't be cut by sample"
    found = set(seen.rows) or set(seen.lengths)
    if not found:
        return None, "it has no tensor with a batch dimension outside of lists"
    if len(found) > 1:
        return None, f"its parts have {' and '.join(map(str, sorted(found)))} entries"
    size = found.pop()
    for length, rows in seen.unsure:
        is_unclear = length == size if rows is None else (length == size) == (rows == size)
        if is_unclear:
            return None, f"a list of {length} {'numbers' if rows is None else 'tensors'} may or may not go by sample"
    return size, ""


@dataclasses.dataclass
class _Seen:
    """Dimension 0 of tensors outside of lists; lengths of lists of samples; lists that may be either; what is neither.

    Of a list that may be either: its length, and the rows of its tensors, `None` for numbers.
    """

    rows: list[int] = dataclasses.field(default_factory=list)
    lengths: list[int] = dataclasses.field(default_factory=list)
    unsure: list[tuple[int, int | None]] = dataclasses.field(default_factory=list)
    foreign: list[str] = dataclasses.field(default_factory=list)


def _look(value: Any, seen: _Seen, *, top: bool = False) -> None:
    if isinstance(value, Tensor):
        if value.dim():
            seen.rows.append(value.shape[0])
    elif _is_list(value, top=top):
        kind = _kind(value)
        if kind == "samples":
            seen.lengths.append(len(value))
        elif kind == "numbers":
            seen.unsure.append((len(value), None))
        else:
            seen.unsure.append((len(value), value[0].shape[0]))
    elif (entries := tree.entries(value)) is not None:
        for entry in entries:
            _look(entry, seen)
    elif not isinstance(value, _PLAIN):
        seen.foreign.append(type(value).__name__)


def _is_list(value: Any, *, top: bool) -> bool:
    """Whether a value may be a list of samples. The batch itself is not, unless it is a list of dictionaries."""
    if not isinstance(value, list | tuple) or hasattr(value, "_fields"):
        return False
    return not top or (isinstance(value, list) and bool(value) and all(isinstance(entry, Mapping) for entry in value))


def _kind(entries: Sequence[Any]) -> str:
    if all(isinstance(entry, Tensor) and entry.dim() for entry in entries) and entries:
        return "tensors" if len({entry.shape[0] for entry in entries}) == 1 else "samples"
    if all(isinstance(entry, bool | int | float | type(None)) for entry in entries):
        return "numbers"
    return "samples"


def _slice(value: Any, size: int, span: slice, *, top: bool = False) -> Any:
    if isinstance(value, Tensor):
        return value[span] if value.dim() and value.shape[0] == size else value
    if _is_list(value, top=top) and len(value) == size:
        return value[span]
    entries = tree.entries(value)
    if entries is None:
        return value
    return tree.rebuild(value, [_slice(entry, size, span) for entry in entries])
