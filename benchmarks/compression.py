"""Training steps with compressed gradients over a slow link, real bytes counted at the network interface.

    python -m benchmarks.compression [--replicas 2] [--rate 100mbit] [--rounds 3] [--codecs int8 onebit ...]

Needs root and the programs `ip` and `tc` (iproute2). Each replica lives in a network namespace of its own; all are
joined by a bridge, and each sends at `--rate` ("none": as fast as it goes). ResNet-18, SGD. Contenders take turns; for
each codec one JSON object a line: bytes sent against plain gradients ("none", the same reducer without compression) and
time of a step against theirs.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torchvision.models import resnet18

from lightning_cnnpar.compression import (
    CompressionEngine,
    CompressionPolicy,
    Compressor,
    PowerSGD,
    TopK,
    choose_compressor,
    from_name,
)
from lightning_cnnpar.data_parallel.comm_hook import CommHook, CompressedReduce, DenseAllReduce
from lightning_cnnpar.data_parallel.replicate import GradientReducer
from lightning_cnnpar.mesh import create_data_group, create_mesh

CODECS: dict[str, Compressor | None] = {
    "none": None,
    **{name: from_name(name) for name in ("bf16", "int8", "int4", "int2", "onebit")},
    "topk": TopK(ratio=0.01),
    "powersgd": PowerSGD(rank=2),
    "auto": None,
}
BRIDGE = "cnnparbr"
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
WARM_UP, STEPS = 2, 3


def measure(names: list[str], rounds: int) -> list[dict[str, Any]]:
    """What one replica sees."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = create_mesh(dist.get_world_size(), 1)
    torch.manual_seed(dist.get_rank())
    images, labels = torch.randn(2, 3, 64, 64), torch.tensor([1, 2])
    chosen, why = choose_compressor(create_data_group(mesh), torch.device("cpu"))
    if dist.get_rank() == 0 and "auto" in names:
        print(why, flush=True)
    codecs = CODECS | {"auto": None if chosen is None else from_name(chosen)}
    steps = {name: _Steps(codecs[name], mesh, images, labels) for name in names}
    for one in steps.values():
        one.run(WARM_UP)
    measured: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, one in steps.items():
            measured[name].append(one.run(STEPS))
    dense = measured["none"]
    return [
        {
            "codec": name,
            "replicas": dist.get_world_size(),
            "seconds": round(statistics.median(seconds for seconds, _ in found), 3),
            "time": round(statistics.median(a / b for (a, _), (b, _) in zip(found, dense, strict=True)), 3),
            "bytes": round(sum(sent for _, sent in found) / sum(sent for _, sent in dense), 4),
        }
        for name, found in measured.items()
    ]


class _Steps:
    """Trains a network of its own."""

    def __init__(self, codec: Compressor | None, mesh: Any, images: Any, labels: Any) -> None:
        self._network = resnet18()
        for parameter in self._network.parameters():
            dist.broadcast(parameter.data, 0)
        self._images, self._labels = images, labels
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=0.01)
        hook: CommHook = DenseAllReduce()
        if codec is not None:
            engine = CompressionEngine(
                CompressionPolicy.of(codec), group=create_data_group(mesh), device=torch.device("cpu")
            )
            hook = CompressedReduce(engine)
        self._reducer = GradientReducer(list(self._network.named_parameters()), mesh=mesh, hook=hook)

    def run(self, steps: int) -> tuple[float, int]:
        """Seconds and bytes of a step."""
        dist.barrier()
        begin, sent = time.perf_counter(), int(SENT.read_text())
        for _ in range(steps):
            self._optimizer.zero_grad()
            F.cross_entropy(self._network(self._images), self._labels).backward()
            self._optimizer.step()
        dist.barrier()
        return (time.perf_counter() - begin) / steps, (int(SENT.read_text()) - sent) // steps


@contextlib.contextmanager
def namespaces(count: int, rate: str) -> Iterator[list[str]]:
    """Network namespaces with an interface `eth0` each, 10.77.0.1 and following, that sends at `rate`."""
    names = [f"cnnpar{index}" for index in range(count)]
    try:
        _ip(f"link add {BRIDGE} type bridge")
        _ip(f"link set {BRIDGE} up")
        for index, name in enumerate(names):
            _ip(f"netns add {name}")
            _ip(f"link add {name}v type veth peer name eth0 netns {name}")
            _ip(f"link set {name}v master {BRIDGE} up")
            _ip(f"-n {name} addr add 10.77.0.{index + 1}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {name} link set lo up")
            if rate == "none":
                continue
            subprocess.run(
                f"tc -n {name} qdisc add dev eth0 root tbf rate {rate} burst 64kb latency 400ms".split(), check=True
            )
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "delete", BRIDGE], check=False, capture_output=True)


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


def main() -> None:
    """Start the replicas, print what the first one measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), choices=list(CODECS))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = ["none", *(name for name in arguments.codecs if name != "none")]
    if arguments.inside:
        found = measure(names, arguments.rounds)
        if dist.get_rank() == 0:
            for line in found:
                print(json.dumps(line | {"rate": arguments.rate}), flush=True)
        dist.barrier()
        return
    with namespaces(arguments.replicas, arguments.rate) as spaces:
        environment = {
            **os.environ,
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": "29517",
            "WORLD_SIZE": str(arguments.replicas),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compression", *sys.argv[1:], "--inside"]
        replicas = [
            subprocess.Popen(["ip", "netns", "exec", space, *command], env={**environment, "RANK": str(rank)})
            for rank, space in enumerate(spaces)
        ]
        try:
            for replica in replicas:
                replica.wait(1800)
        finally:
            for replica in replicas:
                replica.kill()


if __name__ == "__main__":
    main()
