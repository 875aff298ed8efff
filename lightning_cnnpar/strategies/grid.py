"""The grid of ranks as Lightning sees it: where a rank stands, and what the ranks agree on."""

from abc import ABC
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from lightning_cnnpar.mesh import Mesh
from lightning_cnnpar.strategies.collectives import reduce_over_data, stack_over_replicas


class GridStrategy(ParallelStrategy, ABC):
    """A strategy whose ranks form a grid of replicas and stages.

    Values are reduced and gathered over the replicas only, as the ranks of one replica hold the same ones; decisions
    and barriers are of all ranks.
    """

    _mesh: Mesh | None = None
    _num_nodes: int = 1
    _process_group_backend: str | None = None

    @property
    def root_device(self) -> torch.device:
        """Device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Nodes of the run; set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Ranks on each node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one rank; Lightning asks before it reduces."""
        return self.num_nodes * self.num_processes > 1

    @property
    def process_group_backend(self) -> str | None:
        """Backend of `torch.distributed`."""
        return self._process_group_backend

    @property
    def mesh(self) -> Mesh:
        """The grid of ranks; of one rank before the environment is set up."""
        return self._mesh or Mesh()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For code that makes its own sampler: all ranks of a replica see the same samples."""
        return {"num_replicas": self.mesh.data_size, "rank": self.mesh.data_rank}

    def any_rank(self, flag: Tensor) -> None:
        """Replace `flag` by its maximum over all ranks, in place."""
        if self.mesh.world_size > 1:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas; ranks of one replica hold the same value already."""
        return reduce_over_data(tensor, self.mesh, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack the values of all replicas: shape (D, ...)."""
        # The world is what `LightningModule.all_gather` says where the user said nothing.
        if group is not None and group is not dist.group.WORLD:
            return super().all_gather(tensor, group, sync_grads)
        if self.mesh.world_size == 1:
            return tensor
        return stack_over_replicas(tensor, self.mesh, differentiable=sync_grads)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; after an error they may not come, so then nobody waits."""
        if dist.is_initialized() and self.is_distributed and self._may_communicate():
            dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give every rank the object of rank `src`; after an error, each keeps its own."""
        if not dist.is_initialized() or not self.is_distributed or not self._may_communicate():
            return obj
        message = [obj]
        dist.broadcast_object_list(message, src)
        return message[0]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  (Lightning's name)
        """Whether all ranks, or any rank, decided so; after an error, what this one decided."""
        if self.mesh.world_size == 1 or not self._may_communicate():
            return decision
        flag = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(flag)

    def _may_communicate(self) -> bool:
        """Whether the other ranks can be expected in a collective: not after an error."""
        trainer = getattr(self.lightning_module, "_trainer", None)
        return trainer is None or not trainer.interrupted
