"""Which CPUs, how many threads and which node's memory each rank of a machine gets: decided here, not carried out.

    node 0: cores 0 1 2 3 4 5 6 7          two ranks whose devices hang on node 0
            └ rank 0 ┘└ rank 1 ┘           each one's share is 4 cores, so 4 threads
    mode "cores": a rank runs on its share and nowhere else
    mode "node":  a rank runs on any of the cores 0 to 7

Ranks without a device divide the cores of the whole machine, in the order of the nodes.
"""

import dataclasses
import math
from collections.abc import Sequence

from lightning_cnnpar.config import MemoryPolicy, NumaBinding
from lightning_cnnpar.launchers.cpulist import format_list
from lightning_cnnpar.launchers.topology import Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankDevice:
    """What a rank computes on.

    Attributes:
        name: As torch calls it: `cuda:0`, `cpu`.
        address: PCI address; `None` for the CPU, or where it could not be found out.
        node: Node that the device's driver reports, for where the bus doesn't.
    """

    name: str = "cpu"
    address: str | None = None
    node: int | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether it is no device beside the CPU."""
        return self.name == "cpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankBinding:
    """What a rank gets.

    Attributes:
        local_rank: Rank on this machine.
        device: What it computes on.
        node: Node that it is bound to; `None` for none, or for several.
        cpus: CPUs that it may run on.
        threads: Threads that it computes with.
        memory: Memory policy; "off" wherever `node` is `None`.
        network: PCI address of the network controller nearest to its device.
        reason: Why so, in words.
        warnings: What the user should know of.
    """

    local_rank: int
    device: RankDevice
    node: int | None
    cpus: frozenset[int]
    threads: int
    memory: MemoryPolicy
    network: str | None = None
    reason: str = ""
    warnings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pool:
    """Cores that some ranks divide."""

    node: int | None
    cores: tuple[frozenset[int], ...]
    reason: str
    exclusive: bool = True
    divided_by_share: bool = False
    warnings: tuple[str, ...] = ()


def plan_binding(
    topology: Topology,
    local_ranks: int,
    devices: Sequence[RankDevice],
    original_mask: frozenset[int],
    quota: float | None,
    options: NumaBinding,
    *,
    narrowed: bool = False,
) -> list[RankBinding]:
    """Divide the machine among its ranks.

    Args:
        topology: The machine.
        local_ranks: Ranks on it that share `original_mask`.
        devices: What each computes on, by local rank.
        original_mask: CPUs that the ranks were given at their start, before any of this.
        quota: CPU seconds in a second that they share; `None` is no limit.
        options: What was asked for.
        narrowed: Whether whoever started the ranks chose `original_mask` for them: then it is kept as it is.

    Returns:
        One binding for each local rank. No rank is without a CPU, and none gets one outside `original_mask`.
    """
    assert len(devices) == local_ranks
    # A machine that doesn't say what is online is believed to run what the ranks were given.
    allowed = original_mask & topology.online or original_mask
    find_pool = _given_pool if narrowed else _pool_of
    pools = [find_pool(topology, device, allowed) for device in devices]
    bindings = []
    for rank, (device, pool) in enumerate(zip(devices, pools, strict=True)):
        # Ranks that no node takes are in everybody's way: each counts as one of all ranks.
        sharers = (
            [r for r in range(local_ranks) if pools[r].cores == pool.cores] if pool.exclusive else range(local_ranks)
        )
        binding = _bind(topology, rank, device, pool, list(sharers), allowed, options)
        if quota is not None:
            share = max(1, math.floor(quota / local_ranks))
            if share < binding.threads:
                reason = f"{binding.reason}; threads limited by a CPU quota of {quota:g} for {local_ranks} ranks"
                binding = dataclasses.replace(binding, threads=share, reason=reason)
        bindings.append(binding)
    return bindings


def split_evenly(cores: Sequence[frozenset[int]], parts: int, part: int) -> tuple[frozenset[int], ...]:
    """The cores of one of `parts` contiguous shares, whose sizes differ by one at most; with too few, one core each."""
    if len(cores) < parts:
        return (cores[part * len(cores) // parts],)
    return tuple(cores[part * len(cores) // parts : (part + 1) * len(cores) // parts])


def _bind(
    topology: Topology,
    rank: int,
    device: RankDevice,
    pool: _Pool,
    sharers: list[int],
    allowed: frozenset[int],
    options: NumaBinding,
) -> RankBinding:
    share = split_evenly(pool.cores, len(sharers), sharers.index(rank))
    node, cpus, reason, warnings = pool.node, _cpus(pool.cores), pool.reason, list(pool.warnings)
    if pool.exclusive and len(pool.cores) < len(sharers):
        cores = "1 core" if len(pool.cores) == 1 else f"{len(pool.cores)} cores"
        warnings.append(
            f"{len(sharers)} ranks share {cores} (CPUs {format_list(cpus)}): they take turns. Start fewer ranks, or"
            " give the job more CPUs."
        )
    if pool.divided_by_share:
        node, cpus, reason = _near(topology, share, allowed, pool, len(sharers))
    if pool.exclusive and options.mode == "cores" and len(sharers) > 1:
        cpus = _cpus(share)
    memory: MemoryPolicy = options.memory if node is not None and len(topology.nodes) > 1 else "off"
    known = topology.node(node)
    if memory != "off" and known is not None and not known.memory:
        memory, reason = "off", f"{reason}; the node has no memory"
    near = topology.nearest_network(device.address, node)
    return RankBinding(
        local_rank=rank,
        device=device,
        node=node,
        cpus=cpus,
        threads=len(share),
        memory=memory,
        network=None if near is None else near.address,
        reason=reason,
        warnings=tuple(warnings),
    )


def _near(
    topology: Topology, share: Sequence[frozenset[int]], allowed: frozenset[int], pool: _Pool, sharers: int
) -> tuple[int | None, frozenset[int], str]:
    """Node, CPUs and reason of a rank without a device: the nodes that its share of the machine lies on."""
    touched = [node for node in topology.nodes if node.cpus & _cpus(share)]
    if sharers == 1 or not touched:
        return None, _cpus(pool.cores), "the only rank, and no device" if sharers == 1 else pool.reason
    cpus = _cpus([node.cpus for node in touched]) & allowed
    reason = f"no device: its share of {len(pool.cores)} cores"
    return touched[0].id if len(touched) == 1 else None, cpus, reason


def _given_pool(topology: Topology, device: RankDevice, allowed: frozenset[int]) -> _Pool:
    """The CPUs that the rank was given, whatever its device."""
    cores = _cores_of(topology, allowed)
    touched = [node.id for node in topology.nodes if node.cpus & allowed]
    node = touched[0] if len(touched) == 1 else None
    hangs_on = _node_of(topology, device)
    reason = "these CPUs were given to it at its start"
    if hangs_on is None or hangs_on in touched or topology.nodes_overlap:
        return _Pool(node=node, cores=cores, reason=reason)
    warning = (
        f"{device.name} hangs on node {hangs_on}, but its rank was started on CPUs {format_list(allowed)} elsewhere:"
        " let what starts the ranks bind them by device (SLURM: --gpu-bind=closest), or not at all (--cpu-bind=none)."
    )
    return _Pool(node=node, cores=cores, reason=reason, warnings=(warning,))


def _pool_of(topology: Topology, device: RankDevice, allowed: frozenset[int]) -> _Pool:
    everything = _cores_of(topology, allowed)
    if topology.nodes_overlap:
        return _Pool(node=None, cores=everything, reason="the firmware puts the same CPUs on several nodes")
    if len(topology.nodes) == 1:
        return _Pool(node=topology.nodes[0].id, cores=everything, reason="the machine has a single node")
    if device.is_cpu:
        return _Pool(node=None, cores=everything, reason="no device", divided_by_share=True)
    node = topology.node(_node_of(topology, device))
    if node is None:
        where = device.address or "unknown PCI address"
        return _unbound(everything, f"{device.name} ({where}) reports no NUMA node", "check the firmware's settings")
    cores = _cores_of(topology, node.cpus & allowed)
    if not cores:
        what = "no online CPU" if not node.cpus else f"none of the CPUs {format_list(allowed)} that the job has"
        return _unbound(
            everything, f"{device.name} hangs on node {node.id}, which has {what}", "give the job CPUs there"
        )
    return _Pool(node=node.id, cores=cores, reason=f"{device.name} hangs on node {node.id}")


def _node_of(topology: Topology, device: RankDevice) -> int | None:
    """Node of a device as the bus says, else as its driver does."""
    known = topology.device(device.address)
    return device.node if known is None or known.node is None else known.node


def _unbound(cores: tuple[frozenset[int], ...], why: str, fix: str) -> _Pool:
    warning = f"{why}: its rank is not bound to a node. To bind it, {fix}; numa='off' silences this."
    return _Pool(node=None, cores=cores, reason=f"not bound: {why}", exclusive=False, warnings=(warning,))


def _cores_of(topology: Topology, cpus: frozenset[int]) -> tuple[frozenset[int], ...]:
    """Physical cores, as far as `cpus` holds them, node by node."""
    order = {cpu: index for index, node in enumerate(topology.nodes) for cpu in node.cpus}
    cores = [core & cpus for core in topology.cores if core & cpus]
    cores += [frozenset({cpu}) for cpu in sorted(cpus - _cpus(topology.cores))]
    return tuple(sorted(cores, key=lambda core: (order.get(min(core), len(order)), min(core))))


def _cpus(cores: Sequence[frozenset[int]]) -> frozenset[int]:
    return frozenset().union(*cores)
