"""A batch taken apart into what is pickled and the plain contents of its tensors.

The structure is a pickle of the batch in which each plain tensor is replaced by its number, type and shape. So whatever
can be pickled arrives as it was (named tuples, dataclasses, images, strings, tensors inside objects, a tensor that
occurs twice), and the contents of tensors are not pickled. Sparse tensors and tensor subclasses pickle by themselves.
"""

import functools
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_DTYPES = tuple(dict.fromkeys(value for _, value in sorted(vars(torch).items()) if isinstance(value, torch.dtype)))
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}

_Outline = tuple[int, int, tuple[int, ...], tuple[int, ...] | None, str, bool, bool]
"""Number, dtype, shape, strides unless contiguous, device type, pinned, requires_grad."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A batch taken apart.

    Attributes:
        structure: Everything but the contents of plain tensors.
        contents: Those, each as one dimension of bytes on the CPU, in the order in which `unpack` asks for them.
    """

    structure: bytes
    contents: Sequence[Tensor] = ()


def pack(batch: Any) -> Packed:
    """Take `batch` apart.

    Raises:
        TypeError: If something in it can't be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(batch)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            "A batch goes from the rank that loads it to the other ranks of its replica, but this one can't be pickled:"
            f" {error}. Define its classes at the top of a module, and leave out lambdas, locks and open files."
        ) from error
    return Packed(structure=file.getvalue(), contents=pickler.contents)


def unpack(structure: bytes, fill: Callable[[Tensor], None]) -> Any:
    """Build the batch again; `fill` writes the contents of the next tensor into a one-dimensional view of its bytes."""
    return _Unpickler(io.BytesIO(structure), fill).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.contents: list[Tensor] = []
        # The tensors are kept beside their outlines: the identity of one that is gone could come back as another's.
        self._known: dict[int, tuple[_Outline, Tensor]] = {}

    def persistent_id(self, obj: Any) -> _Outline | None:
        if type(obj) is not Tensor or not _is_plain(obj):
            return None
        if id(obj) in self._known:
            return self._known[id(obj)][0]
        content, strides = _content(obj)
        outline = (
            len(self.contents),
            _DTYPE_CODES[obj.dtype],
            tuple(obj.shape),
            strides,
            obj.device.type,
            _has_cuda() and obj.is_pinned(),
            obj.requires_grad,
        )
        self.contents.append(content)
        self._known[id(obj)] = outline, obj
        return outline


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, fill: Callable[[Tensor], None]) -> None:
        super().__init__(file)
        self._fill = fill
        self._known: dict[int, Tensor] = {}

    def persistent_load(self, pid: _Outline) -> Tensor:
        number, code, shape, strides, device, pinned, requires_grad = pid
        if number in self._known:
            return self._known[number]
        dtype = _DTYPES[code]
        pinned = pinned and _has_cuda()
        if strides is None:
            tensor = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)
        else:
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device="cpu", pin_memory=pinned)
        self._fill(_bytes_of(tensor))
        if device != "cpu":
            tensor = tensor.to(device)
        self._known[number] = tensor.requires_grad_(requires_grad)
        return tensor


@functools.cache
def _has_cuda() -> bool:
    # Asked once: the answer takes 100 us where there is no device.
    return torch.cuda.is_available()


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.device.type != "meta"
    )


def _content(tensor: Tensor) -> tuple[Tensor, tuple[int, ...] | None]:
    dense = tensor.detach().cpu().resolve_conj().resolve_neg()
    if dense.is_contiguous():
        return _bytes_of(dense), None
    # Channels-last and other permuted layouts are kept; gaps and overlaps are not.
    if torch.empty_like(dense, device="meta").stride() == dense.stride():
        return _bytes_of(dense), dense.stride()
    return _bytes_of(dense.contiguous()), None


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a tensor without gaps, as one dimension of bytes."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
