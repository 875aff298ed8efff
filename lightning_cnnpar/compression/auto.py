"""Whether compression pays here, found by measuring the link, and the whole way of a bucket through each codec.

For n gradients on N ranks, with b bytes a second on the wire, a step takes

    plain      2 (N - 1) / N · 4 n / b
    encoded    2 (N - 1) / N · 4 n · share / b  +  n · work · 2

where `work` is what encoding, residuals and decoding take: the time of a bucket's exchange less that of its bytes on
the wire. Sending goes on beside the backward pass, but this work competes with it for the cores, and finds its values
in no cache: hence the factor. The mildest way is taken unless a stronger one is faster by `_WORTH`.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from lightning_cnnpar.compression.base import BlockwiseCompressor
from lightning_cnnpar.compression.engine import CompressionEngine, Part
from lightning_cnnpar.compression.policy import CompressionPolicy
from lightning_cnnpar.compression.quantize import BFloat16, Int4, Int8
from lightning_cnnpar.compression.swap import ring_bytes

_CANDIDATES = (BFloat16(), Int8(), Int4())
_WORTH = 0.25
_COMPETES = 2.0
_NUMEL = 1 << 20
_BYTES = 4
# Seconds that a measurement may take, if the link is fast enough.
_SPEND = 0.5
_SLOW = 2.0


def predicted(bandwidth: float, costs: Mapping[str, tuple[float, float]], size: int) -> dict[str, float]:
    """Seconds a gradient and way, the mildest first; "none" sends gradients as they are.

    Args:
        bandwidth: Bytes a second that a rank sends.
        costs: Seconds an element of each codec, and its share of the bytes.
        size: N.
    """
    wire = ring_bytes(size, _BYTES) / bandwidth
    return {"none": wire, **{name: wire * share + seconds for name, (seconds, share) in costs.items()}}


def mildest(seconds: Mapping[str, float]) -> str:
    """The way to take: a stronger one only if it is worth it."""
    chosen = "none"
    for name in seconds:
        if seconds[name] < (1 - _WORTH) * seconds[chosen]:
            chosen = name
    return chosen


def choose_compressor(group: dist.ProcessGroup, device: torch.device) -> tuple[str | None, str]:
    """The compressor to take, and a line that says why: the same on all ranks of the world, which all call this.

    Args:
        group: The ranks that average the same gradients.
        device: Where these are.
    """
    size = dist.get_world_size(group)
    bandwidth = link_bandwidth(group, device)
    wire = ring_bytes(size, _BYTES * _NUMEL) / bandwidth
    work = {codec.name: _work(codec, group, device, wire) for codec in _CANDIDATES}
    # The slowest link and the slowest rank of all stages decide: they save what compression keeps together.
    numbers = torch.tensor([bandwidth, *(-one for one in work.values())], device=device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MIN)
    bandwidth, *slowest = numbers.tolist()
    costs = {codec.name: (-cost, _share(codec)) for codec, cost in zip(_CANDIDATES, slowest, strict=True)}
    seconds = predicted(bandwidth, costs, size)
    chosen = mildest(seconds)
    forecast = ", ".join(f"{name} {1e10 * value:.0f} ms" for name, value in seconds.items())
    why = f"compression='auto' takes {chosen!r}: {8e-6 * bandwidth:,.0f} Mbit/s; for 10 M gradients {forecast}."
    return (None if chosen == "none" else chosen), why


def link_bandwidth(group: dist.ProcessGroup, device: torch.device) -> float:
    """Bytes a second that this rank sends in an all-reduce; a collective of the group.

    The best of several. Whatever else the machine does at the moment makes a link look slower than it is, and then
    compression look better: on fast links there is time for many.
    """
    values = torch.ones(_NUMEL, device=device)

    def reduce() -> None:
        dist.all_reduce(values, group=group)

    first = torch.tensor([_fastest(reduce, device, 1)], device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MAX, group=group)
    seconds = _fastest(reduce, device, repeats(float(first)))
    return ring_bytes(dist.get_world_size(group), _BYTES * _NUMEL) / seconds


def repeats(seconds: float) -> int:
    """How often to repeat what took so long the first time, when connections were still to be made.

    At least a few times: the first time may have been slow by chance. On very slow links nothing changes the answer.
    """
    return max(1 if seconds > _SLOW else 4, min(50, int(_SPEND / seconds)))


def _work(codec: BlockwiseCompressor, group: dist.ProcessGroup, device: torch.device, wire: float) -> float:
    """Seconds an element that all but sending takes.

    Args:
        codec: What encodes.
        group: The ranks; all of them call this.
        device: Where gradients are.
        wire: Seconds that plain values take.
    """
    engine = CompressionEngine(CompressionPolicy.of(codec), group=group, device=device)
    values = torch.linspace(-1, 1, _NUMEL, device=device)
    part = Part("probe", values, (1024, _NUMEL // 1024))

    def exchange() -> None:
        engine.start(0, [part]).wait()
        engine.finish_step()
        values.mul_(1.0 / dist.get_world_size(group))

    first = torch.tensor([_fastest(exchange, device, 1)], device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MAX, group=group)
    seconds = _fastest(exchange, device, repeats(float(first)))
    engine.close()
    return _COMPETES * max(seconds - wire * _share(codec), 0.0) / _NUMEL


def _share(codec: BlockwiseCompressor) -> float:
    return codec.payload_size(_NUMEL) / (_BYTES * _NUMEL)


def _fastest(work: Callable[[], Any], device: torch.device, times_to_try: int) -> float:
    times = []
    for _ in range(times_to_try):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)
