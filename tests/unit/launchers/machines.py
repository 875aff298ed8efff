"""Machines as folders of files, in the kernel's layout, written for a test."""

import dataclasses
from pathlib import Path

from lightning_cnnpar.launchers.cpulist import format_list, parse_list


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What to write: CPUs of each node by id, SMT siblings as lists of CPUs, PCI devices as (class, vendor, node)."""

    nodes: dict[int, str]
    packages: dict[int, str] = dataclasses.field(default_factory=dict)
    siblings: tuple[str, ...] = ()
    offline: str = ""
    memory: dict[int, int] = dataclasses.field(default_factory=dict)
    devices: dict[str, tuple[str, str, str]] = dataclasses.field(default_factory=dict)
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    masks_only: bool = False

    def write(self, root: Path) -> Path:
        """Write it below `root`, and return that."""
        system = root / "sys/devices/system"
        cpus = frozenset().union(*map(parse_list, self.nodes.values()))
        for cpu in cpus:
            _write(system / f"cpu/cpu{cpu}/online", "0" if cpu in parse_list(self.offline) else "1")
            for package, members in self.packages.items():
                if cpu in parse_list(members):
                    _write(system / f"cpu/cpu{cpu}/topology/physical_package_id", str(package))
            for siblings in self.siblings:
                if cpu in parse_list(siblings):
                    self._write_set(system / f"cpu/cpu{cpu}/topology", "thread_siblings_list", siblings)
        for node, members in self.nodes.items():
            self._write_set(system / f"node/node{node}", "cpulist", members)
            size = self.memory.get(node, 1024)
            _write(system / f"node/node{node}/meminfo", f"Node {node} MemTotal:  {size} kB")
        for address, (pci_class, vendor, node_text) in self.devices.items():
            folder = root / "sys/bus/pci/devices" / address
            _write(folder / "class", pci_class)
            _write(folder / "vendor", vendor)
            _write(folder / "numa_node", node_text)
        for name, text in self.files.items():
            _write(root / name, text)
        return root

    def _write_set(self, folder: Path, name: str, members: str) -> None:
        if not self.masks_only:
            _write(folder / name, members)
            return
        bits = sum(1 << cpu for cpu in parse_list(members))
        groups = [f"{bits >> shift & 0xFFFFFFFF:08x}" for shift in range(96, -1, -32)]
        _write(folder / {"cpulist": "cpumap"}.get(name, name.removesuffix("_list")), ",".join(groups))


def two_nodes(cores: int = 4, smt: int = 2, gpus: int = 2) -> Machine:
    """Two nodes with the same number of physical cores each; GPUs alternate between them, a NIC beside each node."""
    total = 2 * cores
    halves = {
        node: format_list(node * cores + core + thread * total for core in range(cores) for thread in range(smt))
        for node in range(2)
    }
    siblings = tuple(format_list(core + thread * total for thread in range(smt)) for core in range(total))
    devices = {f"0000:{16 + gpu:02x}:00.0": ("0x030200", "0x10de", str(gpu % 2)) for gpu in range(gpus)}
    networks = {f"0000:e{node}:00.0": ("0x020000", "0x15b3", str(node)) for node in range(2)}
    return Machine(nodes=halves, packages=halves, siblings=siblings, devices=devices | networks)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")
