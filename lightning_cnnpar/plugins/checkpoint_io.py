"""Checkpoint files that are whole or not there: a kill while writing leaves the previous file as it was.

write   .last.ckpt.1f3a.part ──► fsync ──► rename to last.ckpt ──► fsync of the folder
read    last.ckpt ──► checksum right? ──► load
                         └─ no ──► the newest file of the folder whose checksum is right, with a warning
"""

import contextlib
import copy
import hashlib
import os
import re
import uuid
import warnings
import zipfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from lightning_cnnpar import tree

# A zip archive, which a checkpoint file is, ends with the length of a comment, in two bytes, and the comment.
_LENGTH = 2
_COMMENT = re.compile(rb"sha256:([0-9a-f]{64})\Z")
_COMMENT_LENGTH = len("sha256:") + 64
_CHUNK = 1 << 20


class CorruptCheckpointError(RuntimeError):
    """A checkpoint file is damaged and there is no other to fall back to."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, written beside the target, renamed when they are on disk, and checked when read.

    A local path is written as `.<name>.<random>.part`, flushed to the disk (fsync), renamed over the target, and the
    folder is flushed. The file carries its SHA-256 as the comment of its zip archive, where it can't be parted from the
    contents; files without one are checked by the CRC-32 of their records. Remote file systems have no rename to rely
    on; there Lightning's own way is used.

    Args:
        background: Write in a thread while training goes on, from a copy of the state in host memory. An error of the
            thread is raised at the next save or at the end of the run. The run doesn't end before all is written.
    """

    def __init__(self, *, background: bool = False) -> None:
        super().__init__()
        self._writer = ThreadPoolExecutor(1, "checkpoint-writer") if background else None
        self._pending: list[Future[None]] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint.

        Args:
            checkpoint: What to write.
            path: Target file.
            storage_options: Not used, as in Lightning's `TorchCheckpointIO`.
        """
        if storage_options is not None or not _is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        if self._writer is None:
            write_checkpoint(checkpoint, Path(path))
            return
        self._raise_errors(wait=False)
        self._submit(write_checkpoint, _snapshot(checkpoint), Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint; not before one that is still being written is there."""
        if self._writer is None:
            super().remove_checkpoint(path)
        else:
            self._submit(super().remove_checkpoint, path)

    def load_checkpoint(
        self, path: Any, map_location: Any = lambda storage, location: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, or the newest undamaged one of its folder if it is damaged.

        Args:
            path: The file.
            map_location: As for `torch.load`.
            weights_only: Refuse files that hold more than tensors and plain types; `None` is `True`.

        Raises:
            FileNotFoundError: If there is no such file.
            CorruptCheckpointError: If it is damaged and so are all others of its folder.
        """
        self._raise_errors(wait=True)
        if _is_local(path) and Path(path).is_file():
            path = _undamaged(Path(path))
        loaded: dict[str, Any] = super().load_checkpoint(
            path, map_location, weights_only=True if weights_only is None else weights_only
        )
        return loaded

    def teardown(self) -> None:
        """Wait until all is written."""
        self._raise_errors(wait=True)

    def _submit(self, work: Callable[..., None], *arguments: Any) -> None:
        assert self._writer is not None
        self._pending.append(self._writer.submit(work, *arguments))

    def _raise_errors(self, *, wait: bool) -> None:
        done = [future for future in self._pending if wait or future.done()]
        self._pending = [future for future in self._pending if future not in done]
        for future in done:
            future.result()

    def __getstate__(self) -> dict[str, Any]:
        self._raise_errors(wait=True)
        # A thread belongs to one process; a copy starts its own.
        return {**self.__dict__, "_writer": self._writer is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._writer = ThreadPoolExecutor(1, "checkpoint-writer") if state["_writer"] else None


def write_checkpoint(checkpoint: dict[str, Any], target: Path) -> None:
    """Write `target` so that it is at any moment either what it was or complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with part.open("wb") as file:
            sealed = _Sealed(file)
            torch.save(checkpoint, cast(BinaryIO, sealed))
            sealed.seal()
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        raise
    _flush_folder(target.parent)


def is_undamaged(path: Path) -> bool:
    """Whether a checkpoint file is as it was written."""
    try:
        with path.open("rb") as file:
            expected = _read_seal(file)
            if expected is not None:
                return _digest(file, path.stat().st_size - _COMMENT_LENGTH - _LENGTH) == expected
        if not zipfile.is_zipfile(path):
            return _is_old_format(path)
        with zipfile.ZipFile(path) as archive:
            # The rest of a seal is that of a file that was cut.
            return not archive.comment.startswith(b"sha256:") and archive.testzip() is None
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError):
        return False


class _Sealed:
    """A file that is being written, and its digest up to the length of the archive's comment."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._last = b""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        # How many of the last bytes are still among the last ones afterwards.
        kept = max(0, _LENGTH - len(view))
        self._digest.update(self._last[: len(self._last) - kept])
        self._digest.update(view[:-_LENGTH])
        self._last = (self._last + bytes(view[-_LENGTH:]))[-_LENGTH:]
        return self._file.write(view)

    def flush(self) -> None:
        self._file.flush()

    def seal(self) -> None:
        """Add the digest as the archive's comment."""
        if self._last != b"\0\0":
            return  # not an archive, or one with a comment of its own
        self._file.seek(-_LENGTH, os.SEEK_END)
        self._file.write(_COMMENT_LENGTH.to_bytes(_LENGTH, "little") + b"sha256:" + self._digest.hexdigest().encode())


def _read_seal(file: BinaryIO) -> bytes | None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _COMMENT_LENGTH))
    found = _COMMENT.match(file.read())
    return None if found is None else found.group(1)


def _digest(file: BinaryIO, length: int) -> bytes:
    digest = hashlib.sha256()
    file.seek(0)
    while length > 0:
        chunk = file.read(min(_CHUNK, length))
        if not chunk:
            break
        digest.update(chunk)
        length -= len(chunk)
    return digest.hexdigest().encode()


def _is_old_format(path: Path) -> bool:
    """Files that are no archives (torch before 1.6) have no checksum: whether one is whole, loading it tells."""
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except Exception:
        return False
    return True


def _undamaged(path: Path) -> Path:
    if is_undamaged(path):
        return path
    for other in _newest_first(path):
        if is_undamaged(other):
            warnings.warn(
                f"{path} is damaged (its checksum is wrong). {other}, the newest undamaged checkpoint of that folder,"
                " is loaded instead.",
                stacklevel=2,
            )
            return other
    raise CorruptCheckpointError(
        f"{path} is damaged (its checksum is wrong), and {path.parent} holds no undamaged *{path.suffix} to fall back"
        " to. Give the path of another checkpoint."
    )


def _newest_first(path: Path) -> list[Path]:
    others = [other for other in path.parent.glob(f"*{path.suffix}") if other != path and other.is_file()]
    return sorted(others, key=lambda other: (other.stat().st_mtime_ns, other.name), reverse=True)


def _snapshot(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The state of this moment, on the CPU: training changes tensors in place. What is shared stays shared."""
    leaves, _ = tree.flatten(checkpoint)
    copies = {id(leaf): leaf.detach().to("cpu", copy=True) for leaf in leaves if isinstance(leaf, Tensor)}
    return copy.deepcopy(checkpoint, dict[int, Any](copies))


def _is_local(path: Any) -> bool:
    return "file" in get_filesystem(path).protocol


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
