"""What encoding and decoding cost on one core, for ten million gradients.

python -m benchmarks.codecs

Prints one JSON object a codec: milliseconds (the best of several) and bytes against float32.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_cnnpar.compression import BlockwiseCompressor, TopK, from_name
from lightning_cnnpar.compression.topk import INDEX_BYTES, VALUE_BYTES, largest

NUMEL = 10_000_000
REPEATS = 7


def milliseconds(work: Callable[[], Any]) -> float:
    """The best of several."""
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return round(1000 * min(times), 1)


def blockwise(codec: BlockwiseCompressor) -> dict[str, Any]:
    """Cost of a codec of blocks."""
    values = torch.randn(codec.align(NUMEL)) / 8
    payload, out = codec.encode(values), torch.empty_like(values)
    return {
        "codec": codec.name,
        "encode": milliseconds(lambda: codec.encode(values)),
        "decode": milliseconds(lambda: codec.decode(payload, out)),
        "bytes": round(payload.numel() / (4 * values.numel()), 4),
    }


def sparse(codec: TopK) -> dict[str, Any]:
    """Cost of choosing the largest, and of adding them up."""
    values, count = torch.randn(NUMEL), codec.count(NUMEL)
    chosen, out = largest(values, count), torch.zeros(NUMEL)
    return {
        "codec": codec.name,
        "encode": milliseconds(lambda: largest(values, count)),
        "decode": milliseconds(lambda: out.index_add_(0, chosen, values[chosen])),
        "bytes": round((INDEX_BYTES + VALUE_BYTES) * count / (4 * NUMEL), 4),
    }


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    for name in ("bf16", "int8", "int4", "int2", "onebit"):
        codec = from_name(name)
        assert isinstance(codec, BlockwiseCompressor)
        print(json.dumps(blockwise(codec)), flush=True)
    print(json.dumps(sparse(TopK())))


if __name__ == "__main__":
    main()
