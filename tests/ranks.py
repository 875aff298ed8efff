"""Run a function on several ranks, in processes of this machine.

    test process ── forkserver (torch and the package imported once)
        │               ├── rank 0 ── fn(0, N, *args) ──┐
        │ key-value     ├── rank 1 ── fn(1, N, *args) ──┤ one report each
        │ store         └── ...                         │
        └◄──────────────────────────────────────────────┘

A fork of a warm process is ready in a fraction of the time that a fresh interpreter needs to import torch. The test
process serves the store that the ranks meet at, on a port that the system picks, so that runs never collide.
"""

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lightning_cnnpar

GRACE = 5.0
"""Seconds that the other ranks get to end by themselves once one has failed: a group that hangs is itself a finding."""

_ADDRESS = "127.0.0.1"
_PACKAGE = Path(lightning_cnnpar.__path__[0])


class RankError(RuntimeError):
    """A rank raised, died or did not return in time.

    Attributes:
        rank: The first rank that failed; of those that hang, the lowest.
        errors: What happened, by rank, in the order in which it happened.
    """

    def __init__(self, rank: int, errors: Mapping[int, str]) -> None:
        others = "".join(f"\n--- then rank {other}: {text}" for other, text in errors.items() if other != rank)
        super().__init__(f"rank {rank}: {errors[rank]}{others}")
        self.rank = rank
        self.errors = dict(errors)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What a rank is told. Tensors travel as bytes: shared memory would outlive the process that owns it."""

    rank: int
    world_size: int
    port: int
    timeout: float
    initialize: bool
    environment: Mapping[str, str]
    stacks: str
    call: bytes


@dataclass(kw_only=True)
class _Run:
    """The ranks that are still running, and what the others reported."""

    processes: dict[int, Any]
    reports: dict[int, Connection]
    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    cause: BaseException | None = None

    def pending(self) -> list[int]:
        return [rank for rank in self.processes if rank not in self.results and rank not in self.errors]


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, initialize: bool = True
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on every rank and return the results, in the order of the ranks.

    The ranks see this process's environment, plus the variables that `torchrun` sets; they compute with one thread.

    Args:
        world_size: Number of ranks.
        fn: A function that can be imported, that is, defined at the top of a test module.
        *args: Anything that can be pickled; every rank gets a copy of its own.
        timeout: Seconds after which all ranks are killed. Also the time limit of the default process group.
        initialize: Start the default process group (gloo); otherwise `fn` may do so from the environment variables.

    Raises:
        RankError: If a rank fails. It is raised from that rank's own exception.
    """
    # The store's server lives here, so that no rank loses it when another one ends.
    store = dist.TCPStore(_ADDRESS, 0, is_master=True, wait_for_workers=False)
    call = _dump((fn, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        run = _Run(processes={}, reports={})
        try:
            for rank in range(world_size):
                job = _Job(
                    rank=rank,
                    world_size=world_size,
                    port=store.port,
                    timeout=timeout,
                    initialize=initialize,
                    environment=dict(os.environ),
                    stacks=str(Path(folder, f"{rank}.txt")),
                    call=call,
                )
                _start(run, job)
            _collect(run, timeout, Path(folder))
        finally:
            _kill(run)
    if run.errors:
        raise RankError(next(iter(run.errors)), run.errors) from run.cause
    return [run.results[rank] for rank in range(world_size)]


# --- in the test process ------------------------------------------------------------------------------------------


def _start(run: _Run, job: _Job) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded())
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(job, sending), name=f"rank {job.rank}")
    process.start()
    sending.close()
    run.processes[job.rank] = process
    run.reports[job.rank] = receiving


def _preloaded() -> list[str]:
    # Modules that fail to import are passed over by the server; the rank then reports the failure.
    files = sorted(_PACKAGE.rglob("*.py"))
    names = [".".join(("lightning_cnnpar", *file.relative_to(_PACKAGE).with_suffix("").parts)) for file in files]
    return ["torch", "torch.distributed", "tests.ranks", *(name.removesuffix(".__init__") for name in names)]


def _collect(run: _Run, timeout: float, folder: Path) -> None:
    deadline = time.monotonic() + timeout
    verdict = f"had not returned after {timeout:.0f} s"
    while (pending := run.pending()) and (left := deadline - time.monotonic()) > 0:
        owners: dict[Any, int] = {run.reports[rank]: rank for rank in pending}
        owners.update((run.processes[rank].sentinel, rank) for rank in pending)
        for rank in dict.fromkeys(owners[item] for item in wait(list(owners), timeout=left)):
            _receive(run, rank)
        if run.errors:
            deadline = min(deadline, time.monotonic() + GRACE)
            verdict = f"had not ended {GRACE:.0f} s after the first failure"
    for rank, stack in _stacks(run, run.pending(), folder).items():
        run.errors[rank] = f"{verdict}. It was at:\n{stack}"


def _receive(run: _Run, rank: int) -> None:
    try:
        result, error, exception = _load(run.reports[rank].recv_bytes())
    except (EOFError, ConnectionResetError):
        process = run.processes[rank]
        process.join(GRACE)
        run.errors[rank] = f"ended before it returned, {_how_it_ended(process.exitcode)}"
        return
    if error is None:
        run.results[rank] = result
        return
    run.errors[rank] = error
    if len(run.errors) == 1:
        run.cause = pickle.loads(exception) if exception else None


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"with exit code {exit_code}"


def _stacks(run: _Run, ranks: list[int], folder: Path) -> dict[int, str]:
    for rank in ranks:
        if run.processes[rank].is_alive():
            os.kill(run.processes[rank].pid, signal.SIGUSR1)
    if ranks:
        time.sleep(0.5)
    files = {rank: Path(folder, f"{rank}.txt") for rank in ranks}
    return {rank: file.read_text() if file.exists() else "its start" for rank, file in files.items()}


def _kill(run: _Run) -> None:
    for rank, process in run.processes.items():
        if rank in run.results:
            process.join(GRACE)
        with contextlib.suppress(ProcessLookupError):
            # Each rank leads a process group, which also holds the DataLoader workers that it started.
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        process.close()
        run.reports[rank].close()


# --- in a rank ----------------------------------------------------------------------------------------------------


def _main(job: _Job, report: Connection) -> None:
    os.setpgid(0, 0)
    _end_with_parent()
    stacks = Path(job.stacks).open("w")  # noqa: SIM115 - open until the process ends
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    try:
        _prepare(job)
        fn, args = _load(job.call)
        result = _dump((fn(job.rank, job.world_size, *args), None, None))
    except BaseException as exception:
        result = _dump((None, traceback.format_exc(), _pickled(exception)))
    report.send_bytes(result)
    # After the report: a group that can't be torn down must not hide what the rank had to say.
    if dist.is_initialized():
        dist.destroy_process_group()


def _prepare(job: _Job) -> None:
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ.update(
        OMP_NUM_THREADS="1",
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR=_ADDRESS,
        MASTER_PORT=str(job.port),
        TORCHELASTIC_RUN_ID="tests",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    torch.set_num_threads(1)
    if job.initialize:
        limit = timedelta(seconds=job.timeout)
        dist.init_process_group("gloo", rank=job.rank, world_size=job.world_size, timeout=limit)


def _end_with_parent() -> None:
    # A test process that is killed can't clean up; its ranks would stay and compute.
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _pickled(exception: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(exception)
        pickle.loads(data)
    except Exception:
        return None
    return data
