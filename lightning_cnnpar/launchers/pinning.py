"""Binds the rank that this process is, first thing, and says at the end of the start what every rank got.

options, sysfs, cgroups, mask ──► plan_binding ──► apply, use_threads ──► table on rank 0
                                   (binding)        (affinity, threads)     (report)
"""

import dataclasses
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_cnnpar.config import NumaBinding
from lightning_cnnpar.launchers.affinity import apply, original_mask
from lightning_cnnpar.launchers.binding import plan_binding
from lightning_cnnpar.launchers.cpulist import parse_mask
from lightning_cnnpar.launchers.devices import list_gpus, locate
from lightning_cnnpar.launchers.report import Row, table
from lightning_cnnpar.launchers.threads import use_threads
from lightning_cnnpar.launchers.topology import read_topology


class Bindable(Protocol):
    """What binding a rank needs of the strategy."""

    options: Any
    parallel_devices: Any
    cluster_environment: Any

    @property
    def local_rank(self) -> int:
        """Rank on this machine."""

    @property
    def global_rank(self) -> int:
        """Rank of all."""

    @property
    def num_processes(self) -> int:
        """Ranks on each machine."""

    @property
    def num_nodes(self) -> int:
        """Machines."""


def bind_rank(strategy: Bindable) -> Row | None:
    """Bind this process to its share of the machine, before it touches its device.

    Returns:
        What it got; `None` if nothing was to be done: one rank that asked for nothing keeps all that it has.
    """
    numa = strategy.options.numa
    world = strategy.num_processes * strategy.num_nodes
    if numa == "off" or (numa == "auto" and world == 1) or not sys.platform.startswith("linux"):
        return None
    try:
        topology = read_topology()
    except FileNotFoundError:
        return None  # a sandbox that hides the machine
    options = numa if isinstance(numa, NumaBinding) else NumaBinding()
    mask, warning = original_mask(topology.allowed)
    names = [str(device) for device in strategy.parallel_devices]
    devices = locate(names, list_gpus() if any(name != "cpu" for name in names) else [], os.environ)
    local_rank, ranks, quota = strategy.local_rank, strategy.num_processes, topology.quota
    # Ranks that Lightning starts have the mask of the process that starts them.
    started_elsewhere = not isinstance(strategy.cluster_environment, (LightningEnvironment, type(None)))
    narrowed = started_elsewhere and ranks > 1 and is_narrowed(mask, _parents_mask(), os.environ)
    if narrowed:
        # Each rank has a mask of its own, and knows only that.
        share = None if quota is None else quota / ranks
        binding = plan_binding(topology, 1, [devices[local_rank]], mask, share, options, narrowed=True)[0]
        binding = dataclasses.replace(binding, local_rank=local_rank)
    else:
        binding = plan_binding(topology, ranks, devices, mask, quota, options)[local_rank]
    refusals = apply(binding)
    threads = use_threads(binding.threads)
    warnings = (*((warning,) if warning else ()), *binding.warnings, *refusals)
    memory = "off" if any("memory policy" in refusal for refusal in refusals) else binding.memory
    return Row(
        rank=strategy.global_rank,
        host=socket.gethostname(),
        binding=dataclasses.replace(binding, threads=threads, memory=memory, warnings=warnings),
        decided=binding.cpus != mask or binding.memory != "off",
    )


def is_narrowed(mask: frozenset[int], parents_mask: frozenset[int], environment: Mapping[str, str]) -> bool:
    """Whether what started this rank gave it CPUs of its own, other than those of the other ranks.

    Args:
        mask: CPUs of this process.
        parents_mask: CPUs of the process that started it.
        environment: Where SLURM says how it binds tasks.
    """
    masks = environment.get("SLURM_CPU_BIND_LIST", "")
    if masks:
        try:
            return len({parse_mask(entry.removeprefix("0x")) for entry in masks.split(",")}) > 1
        except ValueError:
            return False
    if "none" in environment.get("SLURM_CPU_BIND_TYPE", ""):
        return False
    return mask < parents_mask


def announce(row: Row | None) -> None:
    """On rank 0, show what all ranks got; a collective of all ranks if there are several.

    The same table isn't shown twice in a process: a script may train several times.
    """
    global _announced
    rows = [row]
    if dist.is_initialized() and dist.get_world_size() > 1:
        rows = [None] * dist.get_world_size()
        dist.all_gather_object(rows, row)
    known = [row for row in rows if row is not None]
    text = table(known) if known else ""
    if not known or text == _announced:
        return
    _announced = text
    rank_zero_info(text)
    for warning in _distinct(known):
        rank_zero_warn(warning)


def _distinct(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(warning for row in rows for warning in row.binding.warnings))


def _parents_mask() -> frozenset[int]:
    parent = os.getppid()
    try:
        return frozenset(os.sched_getaffinity(parent)) if parent else frozenset()
    except (OSError, ProcessLookupError):
        return frozenset()


_announced = ""
