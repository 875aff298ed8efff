"""What compression has left out so far, by parameter: it is added to the gradients of the next step.

    worker     what this rank's own encoding left out
    server     what encoding the sum left out, on the rank that sums that part of the parameter
    velocity   with momentum correction: this rank's gradients of past steps, fading

All values are in units of unscaled gradients divided by the number of replicas, so that what is still to be delivered
of the mean gradient is the sum of all ranks' workers and servers. A step proposes new values; they hold once it is
known that the step was finite everywhere.
"""

import logging
from collections.abc import Callable, Collection, Mapping

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
        self.velocity: dict[str, Tensor] = {}
        self.factors: dict[str, Tensor] = {}
        self._server: dict[str, Segment] = {}
        self._whole: set[str] = set()
        self._proposals: list[tuple[str, Callable[[], None]]] = []
        self._saved: dict[str, Tensor] = {}
        self._formats: dict[str, Tensor] = {}

    def propose_worker(self, name: str, values: Tensor) -> None:
        """What the worker's residual becomes if the step counts; `values` may be reused after the next step began."""
        self._proposals.append((name, lambda: _keep(self.worker, name, values)))

    def propose_velocity(self, name: str, values: Tensor) -> None:
        """What the velocity becomes; `values` may be reused after the next step began."""
        self._proposals.append((name, lambda: _keep(self.velocity, name, values)))

    def propose_server(self, name: str, start: int, values: Tensor) -> None:
        """What the server's residual becomes."""
        self._proposals.append((name, lambda: self._server.__setitem__(name, (start, values.clone()))))

    def propose_nothing_left(self, name: str) -> None:
        """The worker's residual has been sent as it was."""
        self._proposals.append((name, lambda: _forget(self.worker, name)))

    def propose_factor(self, name: str, values: Tensor) -> None:
        """What a low-rank compressor starts from in the next step."""
        self._proposals.append((name, lambda: self.factors.__setitem__(name, values)))

    def withdraw(self, names: Collection[str]) -> None:
        """For these parameters the last step didn't take place: nobody used their sums."""
        self._proposals = [(name, proposal) for name, proposal in self._proposals if name not in names]

    def commit(self) -> None:
        """The last step counts."""
        proposals, self._proposals = self._proposals, []
        for _, proposal in proposals:
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
            For each parameter a tensor of N + 1 rows in its shape: the N workers, and the servers joined. Velocities,
            N rows, are named `<parameter>/velocity`; factors of low-rank compressors, the same on all ranks,
            `<parameter>/factor`.
        """
        gathered: dict[str, Tensor] = {}
        for name in sorted(self.worker):
            own = torch.zeros(2, self.worker[name].numel())
            own[0] = self.worker[name].cpu()
            if name in self._server:
                start, values = self._server[name]
                own[1, start : start + values.numel()] = values.cpu()
            if rows := self._collect(own, group):
                workers, servers = [row[0] for row in rows], torch.stack([row[1] for row in rows]).sum(0)
                gathered[name] = torch.stack([self._shaped(name, row) for row in (*workers, servers)])
        for name in sorted(self.velocity):
            if rows := self._collect(self.velocity[name].cpu(), group):
                gathered[f"{name}/velocity"] = torch.stack([self._shaped(name, row) for row in rows])
        if self.rank == 0:
            gathered |= {f"{name}/factor": factor.cpu() for name, factor in self.factors.items()}
        return gathered

    def _collect(self, own: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
        rows = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(own, rows, dst=dist.get_global_rank(group, 0), group=group)
        return rows or []

    @property
    def saved(self) -> dict[str, Tensor]:
        """What was loaded for parameters that this rank has not met yet."""
        return dict(self._saved)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Keep what `gather` returned, here or in a run with another number of replicas, until `take_up`."""
        self._saved = dict(state)

    def take_up(self, parameters: Mapping[str, Tensor]) -> None:
        """Take over what was loaded for these parameters; each once, also if this is called for it again.

        Raises:
            ValueError: If a residual has another size than its parameter.
        """
        merged = 0
        for name, parameter in parameters.items():
            if not parameter.is_complex():
                self._formats[name] = torch.empty_like(parameter, device="meta")
            rows = self._saved.pop(name, None)
            if rows is not None:
                merged = max(merged, self._take_worker(name, rows, parameter))
            rows = self._saved.pop(f"{name}/velocity", None)
            if rows is not None:
                row = rows[self.rank] if len(rows) == self.size else rows.sum(0) / self.size
                self.velocity[name] = self._flat(name, row, parameter)
            factor = self._saved.pop(f"{name}/factor", None)
            if factor is not None:
                self.factors[name] = factor.to(parameter.device, copy=True)
        if merged and self.rank == 0:
            log.info(f"Gradient residuals of {merged} replicas were merged for {self.size}: nothing of them is lost.")

    def _take_worker(self, name: str, rows: Tensor, parameter: Tensor) -> int:
        if len(rows) != self.size + 1:
            self.worker[name] = self._flat(name, rows.sum(0) / self.size, parameter)
            return len(rows) - 1
        self.worker[name] = self._flat(name, rows[self.rank], parameter)
        # The whole at first; `server` keeps this rank's part.
        self._server[name] = (0, self._flat(name, rows[self.size], parameter))
        self._whole.add(name)
        return 0

    def _shaped(self, name: str, row: Tensor) -> Tensor:
        """A row in the parameter's shape, whatever its memory order."""
        like = self._formats.get(name)
        return row if like is None else row.as_strided(like.shape, like.stride(), row.storage_offset())

    def _flat(self, name: str, row: Tensor, parameter: Tensor) -> Tensor:
        """A row of a checkpoint in the parameter's memory order, where the parameter is."""
        like = self._formats.get(name)
        numel = parameter.numel() * (2 if parameter.is_complex() else 1)
        if row.numel() != numel or (like is not None and row.dim() > 1 and row.shape != like.shape):
            raise ValueError(
                f"The residual of {name!r} in the checkpoint has shape {tuple(row.shape)}, the parameter"
                f" {tuple(parameter.shape)}: the checkpoint belongs to another network."
            )
        flat = torch.empty(numel, dtype=row.dtype, device=parameter.device)
        return flat.copy_(row.view(-1)) if like is None or row.dim() < 2 else _fill_strided(flat, like, row)


def _fill_strided(flat: Tensor, like: Tensor, row: Tensor) -> Tensor:
    flat.as_strided(like.shape, like.stride()).copy_(row)
    return flat


def _forget(where: dict[str, Tensor], name: str) -> None:
    where.pop(name, None)


def _keep(where: dict[str, Tensor], name: str, values: Tensor) -> None:
    if name in where:
        where[name].copy_(values)
    else:
        where[name] = values.clone()
