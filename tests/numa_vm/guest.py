"""Runs inside the emulated machine, without torch: binds two ranks, and prints where they ran and allocated."""

import json
import mmap
import os
import re
import sys
from pathlib import Path

from lightning_cnnpar.config import NumaBinding
from lightning_cnnpar.launchers.affinity import apply, original_mask
from lightning_cnnpar.launchers.binding import RankBinding, RankDevice, plan_binding
from lightning_cnnpar.launchers.topology import read_topology

SIZE = 48 << 20


def main() -> None:
    topology = read_topology()
    mask, _ = original_mask(topology.allowed)
    # The second device first: rank arithmetic alone would be wrong.
    addresses = [device.address for device in reversed(topology.accelerators) if device.node is not None]
    devices = [RankDevice(name=f"cuda:{index}", address=address) for index, address in enumerate(addresses)]
    for mode in ("node", "cores"):
        for memory in ("preferred", "bind", "off"):
            options = NumaBinding(mode=mode, memory=memory)  # type: ignore[arg-type]
            for binding in plan_binding(topology, len(devices), devices, mask, topology.quota, options):
                in_child(binding)
    print("guest: done", flush=True)


def in_child(binding: RankBinding) -> None:
    """Be the rank in a process of its own, that leaves this one unbound."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    refused = apply(binding)
    print(
        "guest:",
        json.dumps({**observe(), "node": binding.node, "memory": binding.memory, "refused": refused}),
        flush=True,
    )
    os._exit(0)


def observe() -> dict[str, object]:
    """Nodes of the CPUs that this process runs on, and pages of new memory by node."""
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ran = set()
    for offset in range(0, SIZE, mmap.PAGESIZE):
        memory[offset] = 1
        ran.add(current_cpu())
    pages: dict[str, int] = {}
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        if f"anon={SIZE // mmap.PAGESIZE}" in line:
            pages = {node: int(count) for node, count in re.findall(r" N(\d+)=(\d+)", line)}
    return {"ran": sorted(ran), "allowed": sorted(os.sched_getaffinity(0)), "pages": pages}


def current_cpu() -> int:
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[36])


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:
        print("guest: failed", repr(error), file=sys.stderr, flush=True)
        raise
