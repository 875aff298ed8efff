"""How many threads a rank computes with, unless the user says.

Lightning divides the CPUs among the ranks wherever `OMP_NUM_THREADS` is unset, torchrun sets it to 1. Neither knows of
nodes, cores or quotas, and dividing what was narrowed already leaves too little. So the launcher sets the variable
first, with a note that it is not the user's; the binding then replaces it.
"""

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import torch

_THREADS = "OMP_NUM_THREADS"
# The value of OMP_NUM_THREADS that came from here.
_OURS = "LIGHTNING_CNNPAR_THREADS"


def reserve_threads(local_ranks: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Before ranks start: let them import torch with a fair number of threads, and Lightning leave it alone."""
    if _THREADS not in environment:
        _note(max(1, _available() // local_ranks), environment)


def use_threads(threads: int, environment: MutableMapping[str, str] = os.environ) -> int:
    """Compute with `threads` threads, unless the user chose a number.

    Returns:
        The number of threads that holds.
    """
    if chosen_by_user(environment):
        return torch.get_num_threads()
    torch.set_num_threads(threads)
    _note(threads, environment)
    return threads


def chosen_by_user(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `OMP_NUM_THREADS` is what a user set, not Lightning's, torchrun's or our own."""
    value = environment.get(_THREADS)
    if value is None or value == environment.get(_OURS):
        return False
    return not (value == "1" and "TORCHELASTIC_RUN_ID" in environment and not _parent_was_started_with(_THREADS))


def _available() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _parent_was_started_with(name: str) -> bool:
    """Whether the parent process had a variable at its start; torchrun sets its own later. True where unknown."""
    try:
        variables = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return True
    return any(variable.startswith(f"{name}=".encode()) for variable in variables)


def _note(threads: int, environment: MutableMapping[str, str]) -> None:
    environment[_THREADS] = environment[_OURS] = str(threads)
