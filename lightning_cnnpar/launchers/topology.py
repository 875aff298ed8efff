"""What the machine is made of, read from the kernel's files under any folder.

    machine ─┬─ package 0 ─┬─ node 0 ─┬─ core ── CPU 0, 16       physical core with its SMT siblings
             │             │          ├─ core ── CPU 1, 17
             │             │          └─ PCI: GPU 3b:00.0, NIC 5e:00.0
             │             └─ node 1 ...
             └─ package 1 ...           └─ node 4, memory only     (no CPU: HBM, CXL or a device's memory)

Node ids have gaps, nodes may have no CPU or no memory, and firmware may claim the same CPUs for several nodes.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from lightning_cnnpar.launchers.cgroup import read_limits
from lightning_cnnpar.launchers.cpulist import clean, parse_list, parse_mask

# PCI classes (upper 16 bits): displays, 3D controllers, co-processors, processing accelerators; network controllers.
_ACCELERATOR_CLASSES = ("0x03", "0x0b40", "0x12")
_NETWORK_CLASS = "0x02"
# Displays of management controllers (ASPEED, Matrox): no rank computes there.
_CONSOLE_VENDORS = ("0x1a03", "0x102b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """A NUMA node.

    Attributes:
        id: The kernel's number of it.
        cpus: Its online CPUs; empty for a node of memory only.
        memory: Whether it has memory.
    """

    id: int
    cpus: frozenset[int]
    memory: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class PciDevice:
    """A device on the PCI bus.

    Attributes:
        address: Domain, bus, device and function: `0000:3b:00.0`.
        pci_class: Class code as the kernel prints it: `0x030200`.
        vendor: Vendor code: `0x10de`.
        node: NUMA node; `None` where the firmware says none, or one that doesn't exist.
        bridges: The bus and the bridges above it, from the root.
        interfaces: Names of its network interfaces.
    """

    address: str
    pci_class: str
    vendor: str
    node: int | None
    bridges: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()

    @property
    def computes(self) -> bool:
        """Whether a rank could run on it."""
        return self.vendor not in _CONSOLE_VENDORS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """A machine.

    Attributes:
        nodes: NUMA nodes, ascending; at least one.
        packages: CPUs of each processor package, by its id.
        cores: Physical cores, each the set of its online SMT siblings, in ascending order of their first CPU.
        online: CPUs that run.
        allowed: Online CPUs that the control groups of this process leave it.
        quota: CPU seconds in a second that they leave it; `None` is no limit.
        accelerators: GPUs and their like, by address.
        networks: Network controllers, by address.
    """

    nodes: tuple[Node, ...]
    packages: dict[int, frozenset[int]]
    cores: tuple[frozenset[int], ...]
    online: frozenset[int]
    allowed: frozenset[int]
    quota: float | None = None
    accelerators: tuple[PciDevice, ...] = ()
    networks: tuple[PciDevice, ...] = ()

    @property
    def nodes_overlap(self) -> bool:
        """Whether two nodes claim the same CPU: then the firmware's nodes mean nothing."""
        return sum(len(node.cpus) for node in self.nodes) > len(frozenset().union(*(node.cpus for node in self.nodes)))

    def node(self, node: int | None) -> Node | None:
        """The node of an id."""
        return next((known for known in self.nodes if known.id == node), None)

    def device(self, address: str | None) -> PciDevice | None:
        """The accelerator at an address."""
        return next((device for device in self.accelerators if device.address == address), None)

    def nearest_network(self, address: str | None, node: int | None) -> PciDevice | None:
        """The network controller that shares most bridges with the accelerator at `address`, else its node."""
        device = self.device(address)
        bridges = device.bridges if device is not None else ()

        def nearness(network: PciDevice) -> tuple[int, bool]:
            shared = 0
            for ours, theirs in zip(bridges, network.bridges, strict=False):
                if ours != theirs:
                    break
                shared += 1
            return shared, node is not None and network.node == node

        near = max(self.networks, key=nearness, default=None)
        return near if near is not None and any(nearness(near)) else None


def read_topology(root: Path | str = "/") -> Topology:
    """Read the files under `root`, which holds `sys` (and `proc`), or is a copy of `sys` itself.

    Raises:
        FileNotFoundError: If there is no description of processors below it.
    """
    root = Path(root)
    system = root / "sys" if (root / "sys/devices/system/cpu").is_dir() else root
    processors = system / "devices/system/cpu"
    if not processors.is_dir():
        raise FileNotFoundError(f"{root} has neither sys/devices/system/cpu nor devices/system/cpu.")
    online = _online(processors)
    nodes = tuple(_nodes(system / "devices/system/node", online))
    limits = read_limits(root)
    # A limit that leaves nothing is not this machine's.
    allowed = online if limits.cpus is None else online & limits.cpus or online
    devices = list(_devices(system / "bus/pci/devices", {node.id for node in nodes}))
    return Topology(
        nodes=nodes,
        packages=_packages(processors, online),
        cores=_cores(processors, online),
        online=online,
        allowed=allowed,
        quota=limits.quota,
        accelerators=tuple(device for device in devices if device.pci_class.startswith(_ACCELERATOR_CLASSES)),
        networks=tuple(device for device in devices if device.pci_class.startswith(_NETWORK_CLASS)),
    )


def _online(processors: Path) -> frozenset[int]:
    present = dict(_numbered(processors, "cpu"))
    listed = _parsed(processors / "online", parse_list) or frozenset(present)
    return frozenset(cpu for cpu in listed if cpu not in present or _text(present[cpu] / "online") != "0")


def _nodes(folder: Path, online: frozenset[int]) -> Iterator[Node]:
    found = _numbered(folder, "node")
    if not found:
        # A kernel without NUMA support.
        yield Node(id=0, cpus=online, memory=True)
    listed = _parsed(folder / "has_memory", parse_list) or _parsed(folder / "has_normal_memory", parse_list)
    for number, path in found:
        cpus = _set_of(path, "cpulist", "cpumap") or frozenset()
        memory = _has_memory(path)
        if memory is None:
            memory = listed is None or number in listed
        yield Node(id=number, cpus=cpus & online, memory=memory)


def _has_memory(node: Path) -> bool | None:
    total = re.search(r"MemTotal:\s*(\d+)", _text(node / "meminfo") or "")
    return None if total is None else int(total[1]) > 0


def _packages(processors: Path, online: frozenset[int]) -> dict[int, frozenset[int]]:
    packages: dict[int, set[int]] = {}
    for cpu, path in _numbered(processors, "cpu"):
        package = _integer(path / "topology/physical_package_id")
        if cpu in online and package is not None:
            packages.setdefault(package, set()).add(cpu)
    return {package: frozenset(cpus) for package, cpus in sorted(packages.items())}


def _cores(processors: Path, online: frozenset[int]) -> tuple[frozenset[int], ...]:
    cores: list[frozenset[int]] = []
    placed: set[int] = set()
    paths = dict(_numbered(processors, "cpu"))
    for cpu in sorted(online):
        if cpu in placed:
            continue
        siblings: frozenset[int] | None = None
        if cpu in paths:
            topology = paths[cpu] / "topology"
            siblings = _set_of(topology, "thread_siblings_list", "thread_siblings")
            siblings = siblings or _set_of(topology, "core_cpus_list", "core_cpus")
        core = ((siblings or frozenset()) & online | {cpu}) - placed
        placed |= core
        cores.append(core)
    return tuple(cores)


def _devices(folder: Path, nodes: set[int]) -> Iterator[PciDevice]:
    for path in sorted(folder.glob("*:*:*.*")):
        node = _integer(path / "numa_node")
        yield PciDevice(
            address=path.name.lower(),
            pci_class=_text(path / "class") or "",
            vendor=_text(path / "vendor") or "",
            node=node if node in nodes else None,
            bridges=tuple(part for part in path.resolve().parent.parts if re.search(r"^pci|:\w+\.\w+$", part)),
            interfaces=tuple(sorted(interface.name for interface in (path / "net").glob("*"))),
        )


def _numbered(folder: Path, prefix: str) -> list[tuple[int, Path]]:
    """The folders `<prefix><number>`, ascending by number."""
    named = ((re.fullmatch(rf"{prefix}(\d+)", path.name), path) for path in folder.glob(f"{prefix}*"))
    return sorted((int(match[1]), path) for match, path in named if match is not None)


def _set_of(folder: Path, list_name: str, mask_name: str) -> frozenset[int] | None:
    """A set that the kernel gives as a list, a mask or both; old kernels have no list."""
    members = _parsed(folder / list_name, parse_list)
    return _parsed(folder / mask_name, parse_mask) if members is None else members


def _parsed(path: Path, parse: Callable[[str], frozenset[int]]) -> frozenset[int] | None:
    text = _text(path)
    try:
        return None if text is None else parse(text)
    except ValueError:
        return None


def _integer(path: Path) -> int | None:
    text = _text(path)
    try:
        return None if text is None else int(text, 0)
    except ValueError:
        return None


def _text(path: Path) -> str | None:
    """A file's value; `None` where there is none: an offline CPU, an old kernel, a masked file of a container."""
    try:
        return clean(path.read_text("utf-8", "replace"))
    except OSError:
        return None
