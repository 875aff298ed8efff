"""The same cut on all replicas, whatever each of them feeds its network first."""

import contextlib
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_cnnpar import tree
from lightning_cnnpar.mesh import Mesh, meet
from lightning_cnnpar.partition.split import Partitioner


def place_alike(partitioner: Partitioner, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh) -> None:
    """Let all replicas place a new network as the first one does, since the best cut depends on the image size.

    Inputs of the same shapes give the same cut, so each replica then works it out by itself. Every rank calls this.

    Args:
        partitioner: Cuts the network; it has placed nothing yet.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        mesh: The grid.
    """
    if mesh.pipeline_size == 1 or mesh.data_size == 1:
        return
    leaves, _ = tree.flatten((args, kwargs))
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
    everywhere = meet(mesh, f"calls a network for the first time, {len(leaves)} inputs", repr(shapes).encode())
    if len(set(everywhere)) == 1:
        return
    placed: list[Any] = [None]
    if mesh.data_rank == 0:
        with contextlib.suppress(Exception):  # the caller meets it again; here, the others are waiting
            partitioner.program(args, kwargs)
        placed = [(partitioner.owners, partitioner.shared)]
    dist.broadcast_object_list(placed, src=mesh.pipeline_rank, group=mesh.data_control_group)
    partitioner.adopt(*placed[0])
