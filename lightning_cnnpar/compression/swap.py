"""Exchanges between all ranks of a group, on CPUs in pieces.

A large message of gloo keeps the other direction of its connection waiting, so two ranks that send each other as much
as they receive take twice the time that the link needs. Messages of up to a megabyte go both ways at once: over 100
Mbit/s, 0.57 s instead of 1.04 s for 6.25 MB each way.

A small all-reduce of gloo is cut into many messages. Their headers and acknowledgements, with four ranks some 4 KB a
collective, add 7 % to what is left of the most strongly compressed gradients. Straight from each rank to each other it
takes half as many.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cnnpar._compat import all_gather_flat

_PIECE = 1 << 20


def ring_bytes(size: int, num_bytes: float) -> float:
    """Bytes that a rank sends in a ring all-reduce of `num_bytes` over `size` ranks."""
    return 2 * (size - 1) / size * num_bytes


def all_to_all(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
    """Send row i to rank i of the group, and receive row i from it.

    Args:
        received: As many rows as ranks; for ranks on CPUs of any dtype, else uint8.
        sent: Of the same shape.
        group: The ranks.
    """
    if sent.device.type != "cpu":
        dist.all_to_all_single(received, sent, group=group)
        return
    _in_pieces(received, list(sent), group)


def all_gather(received: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """Send one row to all ranks of the group, and receive theirs."""
    if own.device.type != "cpu":
        all_gather_flat(received.view(-1), own, group)
        return
    _in_pieces(received, [own] * len(received), group)


def all_reduce(values: Tensor, group: dist.ProcessGroup) -> None:
    """Sum in place over the ranks; the same bits on all of them."""
    if values.device.type != "cpu" or values.nbytes > _PIECE:
        dist.all_reduce(values, group=group)
        return
    size = dist.get_world_size(group)
    rows = values.new_zeros(size, -(-values.numel() // size))
    rows.view(-1)[: values.numel()] = values
    received = torch.empty_like(rows)
    all_to_all(received, rows, group)
    all_gather(rows, received.sum(0), group)
    values.copy_(rows.view(-1)[: values.numel()])


def _in_pieces(received: Tensor, sent: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    received[rank] = sent[rank]
    works = []
    for begin in range(0, received.shape[1], _PIECE):
        piece = slice(begin, begin + _PIECE)
        # Each rank sends to a different one at a time.
        for shift in range(1, size):
            to, source = (rank + shift) % size, (rank - shift) % size
            works.append(dist.irecv(received[source, piece], group=group, group_src=source))
            works.append(dist.isend(sent[to][piece], group=group, group_dst=to))
    for work in works:
        assert work is not None
        work.wait()
