"""The bindings of a run in words: a table, or one line where nothing was decided."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_cnnpar.launchers.binding import RankBinding
from lightning_cnnpar.launchers.cpulist import format_list
from lightning_cnnpar.launchers.topology import Topology

_HEAD = ("rank", "device", "PCI address", "node", "CPUs", "threads", "memory", "nearest NIC", "reason")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A rank and what it got.

    Attributes:
        rank: Global rank.
        host: Name of its machine.
        binding: What it got.
        decided: Whether it was bound to anything.
    """

    rank: int
    host: str
    binding: RankBinding
    decided: bool = True

    def cells(self) -> tuple[str, ...]:
        """One row of the table."""
        binding = self.binding
        values = (
            self.rank,
            binding.device.name,
            binding.device.address,
            binding.node,
            format_list(binding.cpus),
            binding.threads,
            binding.memory,
            binding.network,
            binding.reason,
        )
        return tuple("-" if value is None else str(value) for value in values)


def table(rows: Sequence[Row]) -> str:
    """What every rank got, one line each; a single line where no rank was bound to anything."""
    if not any(row.decided for row in rows):
        return _summary(rows)
    hosts = len({row.host for row in rows}) > 1
    lines = [(*(("host",) if hosts else ()), *_HEAD)]
    lines += [(*((row.host,) if hosts else ()), *row.cells()) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    return "\n".join(text)


def _summary(rows: Sequence[Row]) -> str:
    first = rows[0].binding
    ranks = "1 rank" if len(rows) == 1 else f"{len(rows)} ranks"
    threads = " or ".join(map(str, sorted({row.binding.threads for row in rows})))
    return f"NUMA: {ranks} on CPUs {format_list(first.cpus)}, {threads} thread(s) each ({first.reason})"


def describe(topology: Topology, bindings: Sequence[RankBinding]) -> dict[str, Any]:
    """Machine and bindings as plain data, for JSON: sets of CPUs are lists such as `0-3,8`, an unknown node is -1."""
    return {
        "nodes": [{"id": node.id, "cpus": format_list(node.cpus), "memory": node.memory} for node in topology.nodes],
        "packages": [{"id": package, "cpus": format_list(cpus)} for package, cpus in topology.packages.items()],
        "devices": [
            {"pci": device.address, "node": -1 if device.node is None else device.node}
            for device in topology.accelerators
        ],
        "ranks": [_describe_rank(binding) for binding in bindings],
    }


def _describe_rank(binding: RankBinding) -> Mapping[str, Any]:
    return {
        "rank": binding.local_rank,
        "device": binding.device.name,
        "pci": binding.device.address,
        "node": -1 if binding.node is None else binding.node,
        "cpus": format_list(binding.cpus),
        "threads": binding.threads,
        "memory": binding.memory,
        "network": binding.network,
        "reason": binding.reason,
        "warnings": list(binding.warnings),
    }
