"""The command `cnnpar`: looks at a machine or a network, and trains nothing."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lightning_cnnpar.config import NumaBinding
from lightning_cnnpar.launchers.affinity import original_mask
from lightning_cnnpar.launchers.binding import RankDevice, plan_binding
from lightning_cnnpar.launchers.cpulist import format_list
from lightning_cnnpar.launchers.report import Row, describe, table
from lightning_cnnpar.launchers.topology import Topology, read_topology

Command = Callable[[argparse.Namespace], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: Words after `cnnpar`; by default those of this process.

    Returns:
        Exit code: 0, or 1 if the subcommand can't do what it was asked for, which it says on stderr.
    """
    parser = argparse.ArgumentParser(prog="cnnpar", description=__doc__)
    commands = parser.add_subparsers(title="subcommands", required=True)
    _add_topology(commands)
    options = parser.parse_args(arguments)
    run: Command = options.run
    try:
        run(options)
    except (FileNotFoundError, ValueError) as error:
        sys.stderr.write(f"cnnpar: {error}\n")
        return 1
    return 0


def _add_topology(commands: Any) -> None:
    parser = commands.add_parser("topology", help="the machine's NUMA nodes and devices, and how ranks would be bound")
    parser.add_argument("--sysfs", metavar="DIR", help="a copy of another machine's files: holds `sys`, or is one")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks to bind; by default one for each accelerator")
    parser.add_argument("--mode", choices=["node", "cores"], default="node", help="as in NumaBinding")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_show_topology)


def _show_topology(options: argparse.Namespace) -> None:
    topology = read_topology(options.sysfs or "/")
    mask = topology.allowed
    if options.sysfs is None and hasattr(os, "sched_getaffinity"):
        mask = original_mask(topology.allowed)[0]
    devices = _devices(topology, options.ranks)
    bindings = plan_binding(topology, len(devices), devices, mask, topology.quota, NumaBinding(mode=options.mode))
    if options.json:
        sys.stdout.write(json.dumps(describe(topology, bindings), indent=2) + "\n")
        return
    ranks = [
        Row(rank=rank, host="", binding=binding, decided=binding.cpus != mask or binding.memory != "off")
        for rank, binding in enumerate(bindings)
    ]
    warnings = dict.fromkeys(warning for binding in bindings for warning in binding.warnings)
    lines = [*_machine(topology), "", table(ranks), *(f"warning: {warning}" for warning in warnings)]
    sys.stdout.write("\n".join(lines) + "\n")


def _devices(topology: Topology, ranks: int | None) -> list[RankDevice]:
    """What the ranks would compute on: the accelerators in the order of the bus, else the CPU."""
    if ranks is not None and ranks < 1:
        raise ValueError(f"--ranks {ranks}: give at least 1.")
    computing = [device for device in topology.accelerators if device.computes]
    if ranks is None:
        ranks = len(computing) or 1
    if ranks > len(computing):
        return [RankDevice() for _ in range(ranks)]
    return [RankDevice(name=f"device:{i}", address=computing[i].address) for i in range(ranks)]


def _machine(topology: Topology) -> list[str]:
    lines = [
        f"node {node.id}: CPUs {format_list(node.cpus) or 'none'}, {'memory' if node.memory else 'no memory'}"
        for node in topology.nodes
    ]
    lines += [f"package {package}: CPUs {format_list(cpus)}" for package, cpus in topology.packages.items()]
    for device in topology.accelerators:
        near = topology.nearest_network(device.address, device.node)
        where = "no node" if device.node is None else f"node {device.node}"
        nic = "" if near is None else f", nearest NIC {near.address}"
        lines.append(f"device {device.address}: {where}{nic}")
    widest = max(len(core) for core in topology.cores)
    lines.append(f"{len(topology.cores)} physical cores, up to {widest} CPUs each")
    if topology.allowed != topology.online:
        lines.append(f"control groups allow CPUs {format_list(topology.allowed)} of {format_list(topology.online)}")
    if topology.quota is not None:
        lines.append(f"control groups allow {topology.quota:g} CPU seconds in a second")
    return lines
