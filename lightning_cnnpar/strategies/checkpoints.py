"""Checkpoints of a strategy whose ranks hold stages: one file, as a single process would write it."""

from abc import ABC
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_cnnpar import _compat
from lightning_cnnpar.checkpoint.gather import merge_foreign
from lightning_cnnpar.checkpoint.optimizer import gather_optimizer_state, local_optimizer_state
from lightning_cnnpar.checkpoint.pieces import merge_optimizer_pieces, merge_pieces
from lightning_cnnpar.data_parallel.comm_hook import CompressedReduce
from lightning_cnnpar.data_parallel.sharding import Sharding
from lightning_cnnpar.partition.ownership import canonical_names
from lightning_cnnpar.plugins.checkpoint_io import AtomicCheckpointIO
from lightning_cnnpar.strategies.grid import GridStrategy
from lightning_cnnpar.strategies.networks import Networks

OWN_KEY = "lightning_cnnpar"
"""Of a checkpoint: what no single process would have written."""


class CheckpointStrategy(GridStrategy, ABC):
    """Collects the stages of the first replica on rank 0 to write, and gives each rank its stage to read."""

    _networks: Networks | None = None
    _compression: CompressedReduce | None = None

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """How checkpoint files are written; atomically unless the user chose otherwise."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        else:
            _compat.complete_wrapping_checkpoint_io(self._checkpoint_io, AtomicCheckpointIO)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state of the whole module on rank 0; on other ranks that of their stage."""
        assert self.lightning_module is not None
        if self._networks is not None:
            self._networks.end_step()
        state: dict[str, Any] = self.lightning_module.state_dict()
        return self._merged(state)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """All parameters' state under the indices of one process on rank 0; on other ranks that of their stage."""
        plain = getattr(optimizer, "optimizer", optimizer)
        state = super().optimizer_state(plain)
        sharding = self._sharding
        if sharding is not None and self._may_communicate():
            parameters = [parameter for group in plain.param_groups for parameter in group["params"]]
            state = merge_optimizer_pieces(state, list(map(sharding.slot, parameters)), sharding, self.mesh)
        if self._networks is None or self.mesh.pipeline_size == 1 or not self._merges:
            return state
        return gather_optimizer_state(state, self._owner_of_index(plain), self.mesh)

    def _owner_of_index(self, optimizer: torch.optim.Optimizer) -> list[int | None]:
        assert self.lightning_module is not None
        assert self._networks is not None
        names = canonical_names(self.lightning_module)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [self._networks.ownership.owner(names.get(id(parameter), "")) for parameter in parameters]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the states of this rank's parameters from the file of a single process."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            if self._networks is not None and self.mesh.pipeline_size > 1:
                state = local_optimizer_state(state, self._owner_of_index(optimizer), self.mesh.pipeline_rank)
            optimizer.load_state_dict(state)
        if self._sharding is not None:
            self._sharding.slice_states(self.optimizers)
        _compat.optimizers_to_device(self.optimizers, self.root_device)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of any layout."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        key = getattr(self.precision_plugin, "checkpoint_key", None)
        if key in checkpoint:
            checkpoint[type(self.precision_plugin).__qualname__] = checkpoint[key]
        own = checkpoint.get(OWN_KEY, {})
        if self._compression is not None and "compression" in own:
            self._compression.resume(own["compression"])
        return checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write the file that one process would write; every rank calls this.

        After an error the stages of other ranks can't be collected any more: nothing is written then, and a warning
        says so, since waiting for ranks that are gone would not end.
        """
        if (self.mesh.pipeline_size > 1 or self._sharding is not None) and not self._may_communicate():
            rank_zero_info(
                f"{filepath} was not saved: after an error, what the other pipeline stages or replicas hold can't be"
                f" collected. The last checkpoint written before is intact."
            )
            return
        key = getattr(self.precision_plugin, "checkpoint_key", None)
        own = type(self.precision_plugin).__qualname__
        if key is not None and key != own and own in checkpoint:
            checkpoint[key] = checkpoint.pop(own)
        if self._compression is not None and self._networks is not None and self._may_communicate():
            checkpoint[OWN_KEY] = {"compression": self._compression_state(self._compression, self._networks)}
        super().save_checkpoint(self._merged(checkpoint), filepath, storage_options)

    def _compression_state(self, compression: CompressedReduce, networks: Networks) -> dict[str, Any]:
        """Residuals of all stages and replicas on rank 0; of less on other ranks."""
        assert self.mesh.data_control_group is not None
        state = compression.engine.gather_state(self.mesh.data_control_group)
        # What was loaded for networks that have not been called yet. Ranks have loaded all of it, and others may have
        # taken up some: what they have goes before.
        waiting = state.pop("waiting")
        state["order"] = networks.gradient_order
        if self.mesh.data_rank > 0:
            return state
        if self.mesh.pipeline_size == 1:
            return state | {"residuals": {**waiting, **state["residuals"]}}
        stages: list[Any] | None = [None] * self.mesh.pipeline_size if self.mesh.pipeline_rank == 0 else None
        dist.gather_object(state, stages, dst=self.mesh.global_rank(0), group=self.mesh.control_group)
        if stages is None:
            return state
        return {
            "step": state["step"],
            "residuals": waiting | {name: rows for stage in stages for name, rows in stage["residuals"].items()},
            "order": [name for stage in stages for name in stage["order"]],
        }

    @property
    def _sharding(self) -> Sharding | None:
        pieces = None if self._networks is None else self._networks.pieces
        return None if pieces is None else pieces.sharding

    def _merged(self, state: dict[str, Any]) -> dict[str, Any]:
        sharding = self._sharding
        if sharding is not None and self._may_communicate():
            state = merge_pieces(state, sharding, self.mesh)
        if not self._merges:
            return state
        merged: dict[str, Any] = merge_foreign(state, self.mesh)
        return merged

    @property
    def _merges(self) -> bool:
        """Whether this rank takes part in collecting the stages: those of the first replica do, unless one failed."""
        return self.mesh.data_rank == 0 and self._may_communicate()
