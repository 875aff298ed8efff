"""Replicas of a benchmark that are joined by links of a given rate, and what they print.

                  ┌─────────── bridge ───────────┐
    namespace 0   │ eth0 ── tc: rate             │   each replica sends at that rate
    namespace 1   │ eth0 ── tc: rate             │
                  └──────────────────────────────┘

Needs root and the programs `ip` and `tc` (iproute2). The rate "none" puts no limit on the same links; "loopback" takes
no namespaces at all.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

BRIDGE = "cnnparbr"
LOOPBACK = "loopback"


def run_replicas(module: str, arguments: Sequence[str], *, count: int, rate: str, timeout: float) -> list[Any]:
    """Run `python -m module arguments` once for each replica; all end within the timeout.

    Returns:
        What the first replica printed as JSON objects, one a line. Its other lines are shown.

    Raises:
        RuntimeError: If a replica failed, or had not ended in time.
    """
    with _environments(count, rate) as (prefixes, environment):
        command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
        replicas = [
            subprocess.Popen(
                [*prefix, *command],
                env={**os.environ, **environment, "RANK": str(rank)},
                stdout=subprocess.PIPE if rank == 0 else None,
                text=True,
                start_new_session=True,
            )
            for rank, prefix in enumerate(prefixes)
        ]
        try:
            printed, _ = replicas[0].communicate(timeout=timeout)
            codes = [replica.wait(60) for replica in replicas]
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"had not ended after {timeout:.0f} s") from error
        finally:
            for replica in replicas:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(replica.pid, signal.SIGKILL)
                replica.wait()
    if any(codes):
        raise RuntimeError(f"failed with exit codes {codes}")
    found = []
    for line in printed.splitlines():
        if line.startswith("{"):
            found.append(json.loads(line))
        elif line.strip():
            print(line, flush=True)
    return found


@contextlib.contextmanager
def _environments(count: int, rate: str) -> Iterator[tuple[list[list[str]], dict[str, str]]]:
    environment = {"WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if rate == LOOPBACK:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        yield [[] for _ in range(count)], environment | place
        return
    place = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29517", "GLOO_SOCKET_IFNAME": "eth0"}
    with namespaces(count, rate) as names:
        yield [["ip", "netns", "exec", name] for name in names], environment | place


@contextlib.contextmanager
def namespaces(count: int, rate: str) -> Iterator[list[str]]:
    """Network namespaces with an interface `eth0` each, 10.77.0.1 and following, that sends at `rate`."""
    names = [f"cnnpar{index}" for index in range(count)]
    try:
        _run(f"ip link add {BRIDGE} type bridge")
        _run(f"ip link set {BRIDGE} up")
        for index, name in enumerate(names):
            _run(f"ip netns add {name}")
            _run(f"ip link add {name}v type veth peer name eth0 netns {name}")
            _run(f"ip link set {name}v master {BRIDGE} up")
            _run(f"ip -n {name} addr add 10.77.0.{index + 1}/24 dev eth0")
            _run(f"ip -n {name} link set eth0 up")
            _run(f"ip -n {name} link set lo up")
            if rate != "none":
                # What passes between two ticks of the clock has to fit into the burst.
                burst = "1mb" if rate.endswith("gbit") else "64kb"
                _run(f"tc -n {name} qdisc add dev eth0 root tbf rate {rate} burst {burst} latency 400ms")
        yield names
    finally:
        # The pairs first: with its namespace, an interface goes at some later time, and its name with it.
        ends = [f"link delete {name}v" for name in names] + [f"netns delete {name}" for name in names]
        for end in (*ends, f"link delete {BRIDGE}"):
            subprocess.run(["ip", *end.split()], check=False, capture_output=True)


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)
