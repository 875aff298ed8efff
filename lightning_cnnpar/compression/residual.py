"""What compression has left out so far, by parameter: it is added to the gradients of the next step.

    worker     what this rank's own encoding left out
    server     what encoding the sum left out, on the rank that sums that part of the parameter

All values are in units of unscaled gradients divided by the number of replicas, so that what is still to be delivered
of the mean gradient is the sum of all ranks' workers and servers. A step proposes new values; they hold once it is
known that the step was finite everywhere.
"""

import logging
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

log = logging.getLogger(__name__)

Segment = tuple[int, Tensor]
"""Where it starts in the parameter, and its values."""


class Residuals:
    """The residuals of one rank. Tensors have one dimension, in the parameter's memory order.

    Args:
        rank: This replica.
        size: N, the number of replicas.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.worker: dict[str, Tensor] = {}
        self.factors: dict[str, Tensor] = {}
        self._server: dict[str, Segment] = {}
        self._whole: set[str] = set()
        self._proposals: list[Callable[[], None]] = []

    def propose_worker(self, name: str, values: Tensor) -> None:
        """What the worker's residual becomes if the step counts; `values` may be reused after the next step began."""

        def keep() -> None:
            if name in self.worker:
                self.worker[name].copy_(values)
            else:
                self.worker[name] = values.clone()

        self._proposals.append(keep)

    def propose_server(self, name: str, start: int, values: Tensor) -> None:
        """What the server's residual becomes."""
        self._proposals.append(lambda: self._server.__setitem__(name, (start, values.clone())))

    def propose_factor(self, name: str, values: Tensor) -> None:
        """What a low-rank compressor starts from in the next step."""
        self._proposals.append(lambda: self.factors.__setitem__(name, values))

    def commit(self) -> None:
        """The last step counts."""
        proposals, self._proposals = self._proposals, []
        for proposal in proposals:
            proposal()

    def discard(self) -> None:
        """The last step doesn't count."""
        self._proposals = []

    def server(self, name: str, start: int, stop: int) -> Tensor | None:
        """The server's residual of a part of the parameter.

        If another part was this rank's so far, that goes over to the worker: what is to be delivered stays the same.
        """
        if name not in self._server:
            return None
        first, values = self._server[name]
        last = first + values.numel()
        if name in self._whole:
            # Fresh from a checkpoint: every rank has the whole, and keeps its part.
            self._whole.remove(name)
            values = values[start:stop].clone()
            self._server[name] = (start, values)
            return values
        if (first, last) == (start, stop):
            return values
        self.fold(name)
        return None

    def drop_server(self, name: str) -> None:
        """This rank sums no part of the parameter (any more)."""
        if name in self._server and name not in self._whole:
            self.fold(name)
        self._server.pop(name, None)
        self._whole.discard(name)

    def fold(self, name: str) -> None:
        """Hand the server's residual over to the worker."""
        if name in self._server:
            first, values = self._server.pop(name)
            if name in self._whole:
                # Every rank has the whole: each takes its share.
                self._whole.remove(name)
                values = values / self.size
            self.worker[name][first : first + values.numel()] += values

    def norm(self) -> float:
        """2-norm of all workers' residuals of this rank."""
        squares = [residual.double().square().sum() for residual in self.worker.values()]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def gather(self, group: dist.ProcessGroup) -> dict[str, Tensor]:
        """All ranks' residuals on the group's first rank, empty on others; a collective of a CPU group.

        Returns:
            For each parameter a tensor of N + 1 rows: the N workers, and the servers joined. Factors of low-rank
            compressors, the same on all ranks, are named `<parameter>/factor`.
        """
        first = dist.get_global_rank(group, 0)
        gathered: dict[str, Tensor] = {}
        for name in sorted(self.worker):
            own = torch.zeros(2, self.worker[name].numel())
            own[0] = self.worker[name].cpu()
            if name in self._server:
                start, values = self._server[name]
                own[1, start : start + values.numel()] = values.cpu()
            rows = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else None
            dist.gather(own, rows, dst=first, group=group)
            if rows is not None:
                gathered[name] = torch.stack([*(row[0] for row in rows), torch.stack([row[1] for row in rows]).sum(0)])
        if self.rank == 0:
            gathered |= {f"{name}/factor": factor.cpu() for name, factor in self.factors.items()}
        return gathered

    def load(self, state: Mapping[str, Tensor], names: Mapping[str, torch.device]) -> None:
        """Take over what `gather` returned, here or in a run with another number of replicas.

        Args:
            state: What was gathered.
            names: This rank's parameters, and where each lives.
        """
        merged, rank, size = 0, self.rank, self.size
        for name, device in names.items():
            if f"{name}/factor" in state:
                self.factors[name] = state[f"{name}/factor"].to(device, copy=True)
            if name not in state:
                continue
            rows = state[name].to(device)
            if len(rows) == size + 1:
                self.worker[name] = rows[rank].clone()
                # The whole at first; `server` keeps this rank's part.
                self._server[name] = (0, rows[size].clone())
                self._whole.add(name)
            else:
                merged = len(rows) - 1
                self.worker[name] = rows.sum(0) / size
        if merged and rank == 0:
            log.info(f"Gradient residuals of {merged} replicas were merged for {size}: nothing of them is lost.")
