"""Exceptions that travel: what the loading rank met is raised on the other ranks too, as the same type."""

import pickle
import traceback
from typing import NoReturn


def pack_exception(error: Exception) -> bytes:
    """`error` as bytes. One that doesn't survive pickling becomes a `RuntimeError` that quotes it."""
    text = "".join(traceback.format_exception(error))
    try:
        copied = pickle.loads(pickle.dumps(error))
        faithful = type(copied) is type(error) and str(copied) == str(error)
    except Exception:
        faithful = False
    if faithful:
        return pickle.dumps((error, text))
    summary = f"{type(error).__qualname__}: {error}\n\n{text}"
    return pickle.dumps((RuntimeError(summary), ""))


def raise_packed(data: bytes, *, note: str) -> NoReturn:
    """Raise the exception that another rank packed; `note` says where it comes from."""
    error, text = pickle.loads(data)
    error.add_note(f"({note})" if not text else f"({note}; there it was)\n{text}")
    raise error
