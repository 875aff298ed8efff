"""When one rank fails, the others learn of it at once, by name.

A rank that waits for another inside a collective can't be told anything: it only notices a closed connection, or
nothing at all. So each rank keeps a thread beside its work that reads one key of the run's store:

    rank 3 raises ──► writes its traceback under `failure` and ends
    rank 0, 1, 2  ──► their threads see the key, print it, and let the main thread come out of its collective by itself
                      (the peer's connection is gone); after GRACE seconds they end the process

A rank that was killed writes nothing: ranks on its host see that its process is gone and write the key for it.
"""

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_cnnpar._compat import private_store

PERIOD = 0.5
GRACE = 8.0
# A rank that another one's failure ends uses this exit code.
EXIT_CODE = 70

_FAILURE = "lightning_cnnpar/failure"
_MEMBER = "lightning_cnnpar/member"
_DONE = "lightning_cnnpar/done"


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a run ended.

    Attributes:
        rank: Global rank that failed.
        place: Its replica and stage, in words.
        host: Host name.
        pid: Process id.
        cause: Traceback, or what became of the process.
    """

    rank: int
    place: str
    host: str
    pid: int
    cause: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.place}, PID {self.pid} on {self.host}) failed:\n{self.cause}"

    @property
    def brief(self) -> str:
        """The same on one line: what was raised, without the way there."""
        raised = [line for line in self.cause.splitlines() if line and not line.startswith(" ")] or [self.cause]
        return f"rank {self.rank} ({self.place}, PID {self.pid} on {self.host}) failed: {raised[-1]}"


class FailureWatch:
    """Tells the other ranks when this one fails, and this one when another does.

    Args:
        place: This rank's replica and stage, in words.
        generation: Number of the run in this process group, since one store serves several runs.
    """

    def __init__(self, place: str, generation: int) -> None:
        self._store: Any = private_store()
        self._prefix = f"/{generation}"
        self._rank = dist.get_rank()
        self._world = dist.get_world_size()
        self._self = Failure(self._rank, place, socket.gethostname(), os.getpid(), "")
        self._neighbours: list[Failure] = []
        self._stop = threading.Event()
        self._failure: Failure | None = None
        self._lock = threading.Lock()
        self._store.set(self._key(_MEMBER, self._rank), json.dumps(dataclasses.asdict(self._self)))
        self._thread = threading.Thread(target=self._watch, name="failure-watch", daemon=True)
        self._thread.start()

    def report(self, exception: BaseException) -> Failure | None:
        """Tell the others that this rank fails, unless another one failed first.

        Returns:
            The first failure of the run, if it is another rank's.
        """
        first = self.first_failure(wait=3.0 if _may_follow_from_another(exception) else 0.0)
        if first is None:
            cause = "".join(traceback.format_exception(exception))
            self._write(dataclasses.replace(self._self, cause=cause))
            # Every rank looks once in a period: they say why they stop before they lose the connection to this one.
            time.sleep(1.2 * PERIOD)
            return None
        self._stop.set()
        return None if first.rank == self._rank else first

    def first_failure(self, wait: float = 0.0) -> Failure | None:
        """The first failure that any rank reported, waiting up to `wait` seconds for one."""
        deadline = time.monotonic() + wait
        while True:
            failure = self._read()
            if failure is not None or time.monotonic() > deadline:
                return failure
            self._check_neighbours()
            time.sleep(0.1)

    def close(self) -> None:
        """This rank is done, in good order."""
        self._stop.set()
        try:
            self._store.set(self._key(_DONE, self._rank), "1")
        except RuntimeError:
            return  # rank 0 keeps the store and may be done already

    def _watch(self) -> None:
        # Until all ranks are known, look often: only then can a loss be named.
        while not self._stop.wait(PERIOD if self._knows_all() else PERIOD / 10):
            self._check_neighbours()
            failure = self._read()
            if failure is not None and failure.rank != self._rank:
                self._announce(failure)
                if not self._stop.wait(GRACE):
                    sys.stderr.flush()
                    os._exit(EXIT_CODE)
                return

    def _announce(self, failure: Failure) -> None:
        # One rank shows the traceback for all.
        speaks = self._rank == (1 if failure.rank == 0 else 0)
        sys.stderr.write(f"[rank {self._rank}] stops because {failure if speaks else failure.brief}\n")
        sys.stderr.flush()

    def _read(self) -> Failure | None:
        with self._lock:
            if self._failure is not None:
                return self._failure
            try:
                if self._store.check([_FAILURE + self._prefix]):
                    self._failure = Failure(**json.loads(self._store.get(_FAILURE + self._prefix)))
            except RuntimeError:
                self._failure = self._loss_of_rank_zero()
            return self._failure

    def _loss_of_rank_zero(self) -> Failure | None:
        """Rank 0 keeps the store: when that is unreachable before rank 0 was done, rank 0 is the one that failed."""
        known = next((neighbour for neighbour in self._neighbours if neighbour.rank == 0), None)
        if self._rank == 0:
            return None
        lost = known or Failure(0, "replica 0, stage rank 0", "unknown host", 0, "")
        return dataclasses.replace(lost, cause="its process is gone (killed, or out of memory)")

    def _write(self, failure: Failure) -> None:
        with self._lock:
            try:
                self._store.compare_set(_FAILURE + self._prefix, "", json.dumps(dataclasses.asdict(failure)))
            except RuntimeError:
                return  # the store went with rank 0; its end is noticed by the connections

    def _check_neighbours(self) -> None:
        """Look whether the processes of other ranks on this host are alive."""
        with contextlib.suppress(RuntimeError):  # no store any more: `_read` says what that means
            if not self._knows_all():
                self._neighbours = self._find_neighbours()
            for neighbour in self._neighbours:
                if neighbour.host != self._self.host or _is_alive(neighbour.pid):
                    continue
                if not self._store.check([self._key(_DONE, neighbour.rank)]) and self._read() is None:
                    self._write(dataclasses.replace(neighbour, cause="its process is gone (killed, or out of memory)"))

    def _knows_all(self) -> bool:
        return len(self._neighbours) == self._world - 1

    def _find_neighbours(self) -> list[Failure]:
        keys = [self._key(_MEMBER, rank) for rank in range(self._world) if rank != self._rank]
        present = [key for key in keys if self._store.check([key])]
        return [Failure(**json.loads(self._store.get(key))) for key in present]

    def _key(self, kind: str, rank: int) -> str:
        return f"{kind}{self._prefix}/{rank}"


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return not Path("/proc/self").is_dir()
    return state not in ("Z", "X")


def _may_follow_from_another(exception: BaseException) -> bool:
    """A lost connection or a timeout in a collective is mostly the trace of a failure elsewhere."""
    words = str(exception).lower()
    signs = ("connection", "timed out", "timeout", "peer", "gloo", "nccl", "socket", "store")
    return isinstance(exception, (RuntimeError, TimeoutError, OSError)) and any(sign in words for sign in signs)
