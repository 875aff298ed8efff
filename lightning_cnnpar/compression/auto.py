"""Whether compression pays here, found by measuring the link and the codecs.

For n gradients on N ranks, with b bytes a second on the wire, a step takes

    plain      2 (N - 1) / N · 4 n / b
    encoded    2 (N - 1) / N · 4 n · share / b  +  n · (1.5 encode + 3 decode) · 3

since each rank encodes n values and the sum's n / N, and decodes its own, the others' and the sum. Sending goes on
beside the backward pass, but codecs compete with it for the cores, and find their values in no cache: hence the factor,
without which the forecast was too good over loopback. The mildest way is taken unless a stronger one is faster by
`_WORTH`.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from lightning_cnnpar.compression.base import BlockwiseCompressor
from lightning_cnnpar.compression.quantize import BFloat16, Int4, Int8
from lightning_cnnpar.compression.swap import ring_bytes

_CANDIDATES = (BFloat16(), Int8(), Int4())
_WORTH = 0.25
_COMPETES = 3.0
_NUMEL = 1 << 20
_BYTES = 4


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
    """The compressor to take, and a line that says why; a collective of the group, the same on all its ranks."""
    size = dist.get_world_size(group)
    numbers = torch.tensor(
        [_bandwidth(group, device), *(-_cost(codec, device) for codec in _CANDIDATES)], device=device
    )
    # The slowest link and the slowest rank decide.
    dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=group)
    bandwidth, *slowest = numbers.tolist()
    costs = {codec.name: (-cost, _share(codec)) for codec, cost in zip(_CANDIDATES, slowest, strict=True)}
    seconds = predicted(bandwidth, costs, size)
    chosen = mildest(seconds)
    forecast = ", ".join(f"{name} {1e10 * value:.0f} ms" for name, value in seconds.items())
    why = f"compression='auto' takes {chosen!r}: {8e-6 * bandwidth:,.0f} Mbit/s; for 10 M gradients {forecast}."
    return (None if chosen == "none" else chosen), why


def _bandwidth(group: dist.ProcessGroup, device: torch.device) -> float:
    values = torch.ones(_NUMEL, device=device)
    seconds = _fastest(lambda: dist.all_reduce(values, group=group), device)
    return ring_bytes(dist.get_world_size(group), _BYTES * _NUMEL) / seconds


def _cost(codec: BlockwiseCompressor, device: torch.device) -> float:
    values = torch.linspace(-1, 1, _NUMEL, device=device)
    payload, out = codec.encode(values), torch.empty_like(values)
    encode = _fastest(lambda: codec.encode(values), device)
    decode = _fastest(lambda: codec.decode(payload, out), device)
    return _COMPETES * (1.5 * encode + 3 * decode) / _NUMEL


def _share(codec: BlockwiseCompressor) -> float:
    return codec.payload_size(_NUMEL) / (_BYTES * _NUMEL)


def _fastest(work: Callable[[], Any], device: torch.device) -> float:
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)
