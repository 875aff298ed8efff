"""Carries out a binding in this process: its threads are moved, its memory policy is set.

The CPUs that the process had at first are kept in an environment variable beside those that it was moved to. Whoever
plans again, here or in a process started from here, starts from the first ones, so that nothing is divided twice.
"""

import contextlib
import ctypes
import errno
import os
import platform
from collections.abc import MutableMapping
from pathlib import Path

from lightning_cnnpar.config import MemoryPolicy
from lightning_cnnpar.launchers.binding import RankBinding
from lightning_cnnpar.launchers.cpulist import format_list, parse_list

# "<first CPUs>/<CPUs moved to>", as lists.
_MOVED = "LIGHTNING_CNNPAR_CPUS"
_OPENMP_PLACES = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY")

# Number of set_mempolicy(2), and its modes.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "ppc64le": 261, "s390x": 270, "riscv64": 237, "loongarch64": 237}
_MODES = {"off": 0, "preferred": 1, "bind": 2}


def original_mask(
    online: frozenset[int], environment: MutableMapping[str, str] = os.environ
) -> tuple[frozenset[int], str | None]:
    """The CPUs that this process had before it was bound, and a warning about them.

    Args:
        online: CPUs that the machine and the control groups would allow.
        environment: Where an earlier binding left its note.
    """
    mask = frozenset(os.sched_getaffinity(0))
    first, _, moved = environment.get(_MOVED, "").partition("/")
    if first and parse_list(moved) == mask:
        mask = parse_list(first)
    places = [name for name in _OPENMP_PLACES if environment.get(name, "false").lower() != "false"]
    if places and len(mask) == 1 and len(online) > 1:
        return online, (
            f"{places[0]}={environment[places[0]]!r} made `import torch` move this process to CPU {min(mask)} alone:"
            f" the CPUs {format_list(online)} are taken instead. Unset {places[0]}; ranks are bound without it."
        )
    return mask, None


def apply(binding: RankBinding, environment: MutableMapping[str, str] = os.environ) -> tuple[str, ...]:
    """Move all threads of this process, and allocate from its node from now on.

    Returns:
        What was refused, in words. A refusal changes nothing else: the run goes on, only slower.
    """
    warnings = []
    mask = frozenset(os.sched_getaffinity(0))
    if mask != binding.cpus:
        first = format_list(original_mask(mask, environment)[0])
        try:
            _move_threads(binding.cpus)
        except OSError as error:
            warnings.append(f"rank can't be moved to CPUs {format_list(binding.cpus)}: {error.strerror}.")
        else:
            environment[_MOVED] = f"{first}/{format_list(binding.cpus)}"
    refusal = _set_memory_policy(binding.memory, binding.node)
    if refusal is not None:
        warnings.append(refusal)
    return tuple(warnings)


def _move_threads(cpus: frozenset[int]) -> None:
    moved: set[int] = set()
    # A thread that is started meanwhile has the mask of the one that starts it: look again until there is no new one.
    while new := {int(task.name) for task in Path("/proc/self/task").iterdir()} - moved:
        for thread in new:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cpus)
        moved |= new


def _set_memory_policy(memory: MemoryPolicy, node: int | None) -> str | None:
    global _policy_is_set
    if memory == "off" and not _policy_is_set:
        return None  # what `numactl` or a parent chose stays
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"memory policy {memory!r} is not known on {platform.machine()}: memory is left to the system."
    nodes = 0 if memory == "off" or node is None else 1 << node
    words = nodes.bit_length() // 64 + 1
    mask = (ctypes.c_uint64 * words)(*(nodes >> 64 * word & (1 << 64) - 1 for word in range(words)))
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    arguments = (mask, ctypes.c_ulong(64 * words + 1)) if nodes else (None, ctypes.c_ulong(0))
    if syscall(ctypes.c_long(number), ctypes.c_int(_MODES[memory]), *arguments) == 0:
        _policy_is_set = memory != "off"
        return None
    code = ctypes.get_errno()
    why = errno.errorcode.get(code, str(code))
    return f"memory policy {memory!r} for node {node} was refused ({why}): memory is left to the system."


_policy_is_set = False
