"""Starts two ranks on this machine with one thread each, as an agent such as torchrun would."""

import multiprocessing
import os
import socket
import warnings
from collections.abc import Callable
from typing import Any

import torch


def run_two_ranks(function: Callable[..., None], *arguments: Any, count: int = 1) -> list[Any]:
    """Run `function(rank, put, *arguments)` in two processes.

    Args:
        function: Defined at the top of a module. Calls `put` with what is to be returned.
        arguments: Passed on.
        count: How many results to wait for.

    Returns:
        What was put, in that order.
    """
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, port, results, function, arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = [results.get(timeout=1800) for _ in range(count)]
    for process in ranks:
        process.join(60)
    return found


def _rank(rank: int, port: int, results: Any, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="benchmark",
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    function(rank, results.put, *arguments)
