"""Training steps with compressed gradients over links of several rates; real bytes, counted at the network interface.

    python -m benchmarks.compression [--replicas 2] [--rates 100mbit 1gbit ...] [--rounds 3] [--codecs int8 onebit ...]

ResNet-18, SGD; each replica has a network namespace and a link of its own, see `links`. Contenders take turns, so that
what else happens on the machine meets all of them. Prints tables: bytes sent, and time of a step, each against plain
gradients ("none", the same reducer without compression), the median over the rounds with quartiles; and the bandwidth
below which each compressor pays.

    ddp             torch's `DistributedDataParallel`
    torch powersgd  the same with torch's PowerSGD hook of rank 2. On gloo it hangs with more than one bucket: it gets
                    one, and a start of its own that may take `--patience` seconds
    auto            what `compression="auto"` takes on that link

The tables of `docs/compression.md`, on a quiet machine:

    python -m benchmarks.compression --rates 100mbit
    python -m benchmarks.compression --rates 100mbit --replicas 4 --codecs int8 int2 onebit powersgd
    python -m benchmarks.compression --rates 100mbit 300mbit 1gbit 2gbit 4gbit none --codecs bf16 int8 int4 onebit
    python -m benchmarks.compression --rates 100mbit 1gbit loopback --codecs auto --rounds 20
"""

import argparse
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18

from benchmarks.links import LOOPBACK, run_replicas
from lightning_cnnpar.compression import (
    CompressionEngine,
    CompressionPolicy,
    Compressor,
    PowerSGD,
    TopK,
    choose_compressor,
    from_name,
)
from lightning_cnnpar.compression.auto import link_bandwidth
from lightning_cnnpar.data_parallel.comm_hook import CommHook, CompressedReduce, DenseAllReduce
from lightning_cnnpar.data_parallel.replicate import GradientReducer
from lightning_cnnpar.mesh import create_data_group, create_mesh

CODECS: dict[str, Compressor] = {
    **{name: from_name(name) for name in ("bf16", "int8", "int4", "int2", "onebit")},
    "topk": TopK(ratio=0.01),
    "powersgd": PowerSGD(rank=2),
}
TORCH_HOOK = "torch powersgd"
CONTENDERS = ("ddp", *CODECS, "auto", TORCH_HOOK)
WARM_UP, STEPS = 3, 3


# ---- inside a replica ------------------------------------------------------------------------------------------------


def measure(names: Sequence[str], rounds: int, rate: str) -> list[dict[str, Any]]:
    """What one replica sees."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = create_mesh(dist.get_world_size(), 1)
    group = create_data_group(mesh)
    chosen = None
    if "auto" in names:
        chosen, why = choose_compressor(group, torch.device("cpu"))
        if dist.get_rank() == 0:
            print(why, flush=True)
    link = 8e-6 * link_bandwidth(group, torch.device("cpu"))
    codecs = CODECS if chosen is None else {**CODECS, "auto": from_name(chosen)}
    contenders = {name: _Steps(name, codecs.get(name), mesh, _Counter(rate)) for name in names}
    for one in contenders.values():
        one.run(WARM_UP)
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(rounds):
        # In turns, once from the front and once from the back.
        for name in names if number % 2 == 0 else reversed(names):
            measured[name].append(contenders[name].run(STEPS))
    dense = measured["none"]
    return [
        {
            "codec": name,
            "replicas": dist.get_world_size(),
            "rate": rate,
            "link": round(link),
            "seconds": round(statistics.median(seconds for seconds, _ in found), 3),
            **_quartiles([a / b for (a, _), (b, _) in zip(found, dense, strict=True)]),
            "bytes": round(sum(sent for _, sent in found) / sum(sent for _, sent in dense), 4),
            "took": chosen or "none" if name == "auto" else name,
        }
        for name, found in measured.items()
    ]


def _quartiles(ratios: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"time": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


class _Counter:
    """Bytes that this replica has sent so far; over loopback, its share of what all sent."""

    def __init__(self, rate: str) -> None:
        name = "lo" if rate == LOOPBACK else "eth0"
        self._path = Path(f"/sys/class/net/{name}/statistics/tx_bytes")
        self._senders = dist.get_world_size() if rate == LOOPBACK else 1

    def read(self) -> float:
        return int(self._path.read_text()) / self._senders


class _Steps:
    """Trains a network of its own."""

    def __init__(self, name: str, codec: Compressor | None, mesh: Any, counter: _Counter) -> None:
        torch.manual_seed(dist.get_rank())
        self._images, self._labels = torch.randn(2, 3, 64, 64), torch.tensor([1, 2])
        self._counter = counter
        network = resnet18()
        for parameter in network.parameters():
            dist.broadcast(parameter.data, 0)
        self._optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
        self._network = self._wrapped(name, network) if name in ("ddp", TORCH_HOOK) else network
        if self._network is network:
            self._reducer = GradientReducer(list(network.named_parameters()), mesh=mesh, hook=_hook(codec, mesh))

    @staticmethod
    def _wrapped(name: str, network: nn.Module) -> nn.Module:
        if name == "ddp":
            return DistributedDataParallel(network, broadcast_buffers=False)
        wrapped = DistributedDataParallel(network, broadcast_buffers=False, bucket_cap_mb=4096)
        # Not earlier than its second step: the first one rebuilds the buckets, and the state goes by bucket.
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return wrapped

    def run(self, steps: int) -> tuple[float, float]:
        """Seconds and bytes of a step."""
        dist.barrier()
        begin, sent = time.perf_counter(), self._counter.read()
        for _ in range(steps):
            self._optimizer.zero_grad()
            F.cross_entropy(self._network(self._images), self._labels).backward()
            self._optimizer.step()
        dist.barrier()
        return (time.perf_counter() - begin) / steps, (self._counter.read() - sent) / steps


def _hook(codec: Compressor | None, mesh: Any) -> CommHook:
    if codec is None:
        return DenseAllReduce()
    policy, group = CompressionPolicy.of(codec), create_data_group(mesh)
    return CompressedReduce(CompressionEngine(policy, group=group, device=torch.device("cpu")))


# ---- outside ---------------------------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A row a contender, a column a rate: time with its quartiles, and bytes."""
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    links = {row["rate"]: row["link"] for row in rows if "link" in row}
    by_place = {(row["codec"], row["rate"]): row for row in rows}
    header = ["time, bytes", *(f"{rate} ({links.get(rate, 0):,} Mbit/s measured)" for rate in rates)]
    lines = [header, ["---"] * len(header)]
    for codec in dict.fromkeys(row["codec"] for row in rows):
        lines.append([codec, *(_cell(by_place.get((codec, rate))) for rate in rates)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "failure" in row:
        return str(row["failure"])
    took = f" ({row['took']})" if row["codec"] == "auto" else ""
    return f"{row['time']:.2f} [{row['low']:.2f}, {row['high']:.2f}], {row['bytes']:.4f}{took}"


def break_even(points: Sequence[tuple[float, float]]) -> str:
    """Where the time of a step comes to that of plain gradients, between two of the measured bandwidths.

    Args:
        points: Bandwidths and times against plain gradients.
    """
    points = sorted(points)
    for (slow, before), (fast, after) in itertools.pairwise(points):
        if before < 1 <= after:
            share = (1 - before) / (after - before)
            return f"{math.exp(math.log(slow) + share * (math.log(fast) - math.log(slow))):,.0f} Mbit/s"
    return f"beyond {points[-1][0]:,.0f} Mbit/s" if points[-1][1] < 1 else f"below {points[0][0]:,.0f} Mbit/s"


def _compare(arguments: argparse.Namespace, rate: str) -> list[dict[str, Any]]:
    together = ["none", *(name for name in arguments.codecs if name != TORCH_HOOK)]
    rows = _start(arguments, rate, together, arguments.timeout)
    if TORCH_HOOK not in arguments.codecs:
        return rows
    try:
        return rows + _start(arguments, rate, ["none", TORCH_HOOK], arguments.patience)[1:]
    except RuntimeError as error:
        return [*rows, {"codec": TORCH_HOOK, "rate": rate, "failure": str(error)}]


def _start(arguments: argparse.Namespace, rate: str, names: Sequence[str], timeout: float) -> list[dict[str, Any]]:
    inside = ["--inside", "--rounds", str(arguments.rounds), "--rates", rate, "--codecs", *names[1:]]
    return run_replicas("benchmarks.compression", inside, count=arguments.replicas, rate=rate, timeout=timeout)


def main() -> None:
    """Start the replicas, and print what the first one measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rates", nargs="+", default=["100mbit"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--codecs", nargs="*", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that a rate may take")
    parser.add_argument("--patience", type=float, default=300, help="seconds that torch's hook may take")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        found = measure(["none", *arguments.codecs], arguments.rounds, arguments.rates[0])
        if dist.get_rank() == 0:
            for line in found:
                print(json.dumps(line), flush=True)
        dist.barrier()
        os._exit(0)  # a hook of torch may have left a thread that never ends
    rows = []
    for rate in arguments.rates:
        rows += _compare(arguments, rate)
        for row in rows:
            if row["rate"] == rate:
                print(json.dumps(row), flush=True)
    print(f"\n{arguments.replicas} replicas\n\n{table(rows)}\n")
    for codec in CODECS if len(arguments.rates) > 1 else ():
        points = [(row["link"], row["time"]) for row in rows if row["codec"] == codec and "link" in row]
        if points:
            print(f"{codec} pays up to {break_even(points)}")


if __name__ == "__main__":
    main()
