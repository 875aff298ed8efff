"""Checkpoint files that are whole or not there: a kill while writing leaves the previous file as it was."""

import contextlib
import os
import uuid
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.plugins.io import TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, written in the folder of the target and renamed when they are on the disk.

    A local path is written as `.<name>.<random>.part`, flushed to the disk (fsync), renamed over the target, and the
    folder is flushed. Remote file systems have no rename to rely on; there Lightning's own way is used.
    """

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
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
        try:
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                part.unlink()
            raise
        _flush_folder(target.parent)


def _is_local(path: Any) -> bool:
    return "file" in get_filesystem(path).protocol


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
