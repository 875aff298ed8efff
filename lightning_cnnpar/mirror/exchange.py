"""What the replicas tell each other about data: the order of an epoch, and whether there is another batch.

Only the loading rank of each replica (its first) takes part, over the data axis:

    replica 0   [rank 0] ──order──┐
    replica 1   [rank P] ◄────────┤      from_first
    replica 2   [rank 2P] ◄───────┘
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightning_cnnpar.mesh import Mesh, meet
from lightning_cnnpar.mirror.failures import pack_exception, raise_packed

_INTEGERS, _OBJECTS, _FAILURE = range(3)


class Exchange(Protocol):
    """The loading ranks of all replicas."""

    size: int
    """D."""
    index: int
    """This replica, in [0, D)."""

    def from_first(self, make: Callable[[], list[Any]]) -> list[Any]:
        """What `make` returns on replica 0, which alone calls it. If it raises, every replica raises."""

    def gather(self, value: int) -> list[int]:
        """Every replica's `value`, in their order."""


class GroupExchange:
    """The exchange over `Mesh.data_control_group`."""

    def __init__(self, mesh: Mesh) -> None:
        self.size = mesh.data_size
        self.index = mesh.data_rank
        self._mesh = mesh
        self._group = mesh.data_control_group
        self._first = mesh.pipeline_rank

    def from_first(self, make: Callable[[], list[Any]]) -> list[Any]:
        """See `Exchange.from_first`."""
        if self.size == 1:
            return make()
        meet(self._mesh, "begins an epoch")
        if self.index == 0:
            return self._tell(make)
        kind, payload = self._listen()
        if kind == _INTEGERS:
            return payload.tolist()
        if kind == _FAILURE:
            raise_packed(payload.numpy().tobytes(), note="raised by the sampler of replica 0")
        listed: list[Any] = pickle.loads(payload.numpy().tobytes())
        return listed

    def gather(self, value: int) -> list[int]:
        """See `Exchange.gather`."""
        if self.size == 1:
            return [value]
        rows = meet(self._mesh, "takes a batch", value.to_bytes(8, "little", signed=True))
        return [int.from_bytes(row, "little", signed=True) for row in rows]

    def _tell(self, make: Callable[[], list[Any]]) -> list[Any]:
        try:
            items = make()
            kind, payload = _pack(items)
        except Exception as error:
            self._send(_FAILURE, _bytes_tensor(pack_exception(error)))
            raise
        self._send(kind, payload)
        return items

    def _send(self, kind: int, payload: torch.Tensor) -> None:
        header = torch.tensor([kind, payload.numel()], dtype=torch.int64, device="cpu")
        dist.broadcast(header, src=self._first, group=self._group)
        if payload.numel():
            dist.broadcast(payload, src=self._first, group=self._group)

    def _listen(self) -> tuple[int, torch.Tensor]:
        header = torch.empty(2, dtype=torch.int64, device="cpu")
        dist.broadcast(header, src=self._first, group=self._group)
        kind, size = header.tolist()
        payload = torch.empty(size, dtype=torch.int64 if kind == _INTEGERS else torch.uint8, device="cpu")
        if size:
            dist.broadcast(payload, src=self._first, group=self._group)
        return kind, payload


def _pack(items: Sequence[Any]) -> tuple[int, torch.Tensor]:
    if all(type(item) is int for item in items):
        return _INTEGERS, torch.tensor(items, dtype=torch.int64, device="cpu")
    return _OBJECTS, _bytes_tensor(pickle.dumps(items, protocol=5))


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
