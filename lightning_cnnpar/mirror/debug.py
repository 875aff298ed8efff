"""A check that all ranks of a replica hold the same batch and the same random state, for hunting differences.

Off unless the environment variable `CNNPAR_DEBUG_BATCHES` is 1; it costs a pass over each batch and a collective.
"""

import hashlib
import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cnnpar.mesh import Mesh
from lightning_cnnpar.mirror.randomness import fingerprint
from lightning_cnnpar.tree import flatten

VARIABLE = "CNNPAR_DEBUG_BATCHES"


class BatchCheck:
    """Checks nothing."""

    def before(self) -> None:
        """Called before a batch is fetched."""

    def after(self, batch: Any, index: int) -> None:
        """Called with each batch on every rank."""


class ComparingCheck(BatchCheck):
    """Compares fingerprints over a replica."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._randomness = 0

    def before(self) -> None:
        """Note the state that the user's step left; fetching a batch may overwrite it."""
        self._randomness = fingerprint()

    def after(self, batch: Any, index: int) -> None:
        """Compare with the other ranks.

        Raises:
            RuntimeError: On every rank, naming those that differ from the one that loads.
        """
        own = torch.tensor([self._randomness, batch_fingerprint(batch)], dtype=torch.int64, device="cpu")
        gathered = [torch.empty_like(own) for _ in range(self._mesh.pipeline_size)]
        dist.all_gather(gathered, own, group=self._mesh.control_group)
        rows = [row.tolist() for row in gathered]
        self._compare([row[0] for row in rows], index, "random state before it", "random numbers drawn")
        self._compare([row[1] for row in rows], index, "content", "a change in place of what the data set keeps")

    def _compare(self, prints: list[int], index: int, what: str, cause: str) -> None:
        differing = [self._mesh.global_rank(rank) for rank, value in enumerate(prints) if value != prints[0]]
        if differing:
            raise RuntimeError(
                f"Batch {index}: the {what} differs on rank(s) {differing} from rank {self._mesh.global_rank(0)}, which"
                f" loads for this replica (fingerprints by pipeline rank: {[f'{value:x}' for value in prints]}). Look"
                f" for {cause} in code that depends on the rank."
            )


def batch_check(mesh: Mesh) -> BatchCheck:
    """The check that the environment asks for."""
    return ComparingCheck(mesh) if os.environ.get(VARIABLE) == "1" else BatchCheck()


def batch_fingerprint(batch: Any) -> int:
    """63 bits that tell batches apart by types, shapes and contents."""
    digest = hashlib.blake2b(digest_size=8)
    leaves, spec = flatten(batch)
    digest.update(repr(spec).encode())
    for leaf in leaves:
        _update(digest, leaf)
    return int.from_bytes(digest.digest(), "little") >> 1


def _update(digest: Any, leaf: Any) -> None:
    digest.update(type(leaf).__qualname__.encode())
    if type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_quantized:
        digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
        flat = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
        digest.update(f"{leaf.dtype} {leaf.shape}".encode())
        digest.update(leaf.tobytes())
    elif isinstance(leaf, str | bytes | int | float | complex) or leaf is None:
        digest.update(repr(leaf).encode())
