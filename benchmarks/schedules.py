"""Schedules side by side on two ranks with one thread each, in one run, and on paper for more ranks.

    python -m benchmarks.schedules [--rounds 3] [--steps 5] [--networks resnet unet] [--microbatches 4]

Contenders take turns, round by round. The limit of a schedule is the time of the slower stage alone (both stages at
once, M microbatches, nothing exchanged) times what its bubble adds:

    gpipe, 1f1b          (M + P - 1) / M
    interleaved_1f1b     (M + (P - 1) / V) / M, V = 2 stages a rank
    zero_bubble          (3 M + P - 1) / (3 M), if F, I and W take the same time

"raw" is `torch.distributed.pipelining` with the same cut, microbatches and optimizer; torchgpipe 0.0.7 runs both stages
in the threads of one process, with the same cut points.
"""

import argparse
import importlib.util
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torchvision.models import ResNet

from benchmarks.pipeline import WORKS, Contenders, StageModule, median_time, pin_rank
from benchmarks.two_ranks import run_two_ranks
from lightning_cnnpar import HybridStrategy
from lightning_cnnpar.pipeline.schedules import StepSchedule, gpipe, step_tables
from lightning_cnnpar.pipeline.simulate import chain, simulate

RAW = {"raw gpipe": ScheduleGPipe, "raw 1f1b": Schedule1F1B, "raw zero_bubble": ScheduleInterleavedZeroBubble}
OURS: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved_1f1b": {"schedule": "interleaved_1f1b", "stages_per_rank": 2},
    "zero_bubble": {"schedule": "zero_bubble"},
    "gpipe, always": {"schedule": "gpipe", "activation_checkpointing": "always"},
    "1f1b, always": {"schedule": "1f1b", "activation_checkpointing": "always"},
}


def fill(schedule: str, ranks: int, microbatches: int) -> float:
    """By what a schedule's bubble makes a step longer than its slowest rank's work."""
    if schedule.startswith("interleaved"):
        return (microbatches + (ranks - 1) / 2) / microbatches
    if schedule.startswith("zero_bubble"):
        return (3 * microbatches + ranks - 1) / (3 * microbatches)
    return (microbatches + ranks - 1) / microbatches


class RawSchedule:
    """`torch.distributed.pipelining` with our cut."""

    def __init__(self, kind: Any, contenders: Contenders) -> None:
        work, program, rank = contenders.work, contenders.program, contenders.rank
        network = contenders.fresh_network()
        own = nn.ModuleList(network.get_submodule(name) for name in program.stages[rank].modules)
        self._rank = rank
        self._optimizer = torch.optim.SGD(own.parameters(), lr=0.01)
        stage: Any = PipelineStage(StageModule(network, program, rank), rank, 2, torch.device("cpu"))
        stages = [stage] if kind is ScheduleInterleavedZeroBubble else stage
        self._schedule = kind(stages, n_microbatches=work.microbatches, loss_fn=work.loss)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One training step."""
        self._optimizer.zero_grad()
        if self._rank == 0:
            self._schedule.step(images)
        else:
            self._schedule.step(target=labels, losses=[])
        self._optimizer.step()


class Torchgpipe:
    """torchgpipe with both stages on this machine's CPU, a thread each; for networks that are a chain."""

    def __init__(self, contenders: Contenders) -> None:
        from torchgpipe import GPipe

        network: Any = contenders.fresh_network()
        assert isinstance(network, ResNet)
        chain_of = _as_chain(network)
        first = set(contenders.program.stages[0].modules)
        count = sum(1 for name, _ in chain_of if any(m == name or m.startswith(f"{name}.") for m in first))
        layers = nn.Sequential(*(layer for _, layer in chain_of))
        balance, chunks = [count, len(layers) - count], contenders.work.microbatches
        self._model = GPipe(layers, balance, devices=["cpu", "cpu"], chunks=chunks, checkpoint="never")
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._loss = contenders.work.loss

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One training step."""
        self._optimizer.zero_grad()
        self._loss(self._model(images), labels).backward()
        self._optimizer.step()


def _as_chain(network: ResNet) -> list[tuple[str, nn.Module]]:
    stem = [(name, getattr(network, name)) for name in ("conv1", "bn1", "relu", "maxpool")]
    layers = ("layer1", "layer2", "layer3", "layer4")
    blocks = [(f"{layer}.{i}", block) for layer in layers for i, block in enumerate(getattr(network, layer))]
    return [*stem, *blocks, ("avgpool", network.avgpool), ("flatten", nn.Flatten(1)), ("fc", network.fc)]


class Schedules(Contenders):
    """All schedules of one network."""

    def prepare(self) -> None:
        """Build the peers."""
        self._peers: dict[str, Callable[[Tensor, Tensor], None]] = {}
        for name, kind in RAW.items():
            self._peers[name] = RawSchedule(kind, self).step
        # One process runs both stages; it needs both cores.
        chainable = isinstance(self.network, ResNet)
        installed = importlib.util.find_spec("torchgpipe") is not None
        self._chainable = chainable and installed
        self._torchgpipe = Torchgpipe(self).step if self.rank == 0 and self._chainable else None

    def run(self) -> dict[str, float]:
        """One round: seconds of a step."""
        images, labels, work = self.images, self.labels, self.work
        found = {"one process": self.alone(), "stages alone": self.stages_alone()}
        for name, options in OURS.items():
            strategy = HybridStrategy(2, 1, num_microbatches=work.microbatches, **options)
            found[name] = self.fit(strategy, 1)
        for name, step in self._peers.items():
            found[name] = self.timed(lambda step=step: step(images, labels))  # type: ignore[misc]
        dist.barrier()
        if self._chainable:
            found["torchgpipe"] = self._on_both_cores() if self._torchgpipe is not None else 0.0
            dist.barrier()
        return found

    def _on_both_cores(self) -> float:
        step = self._torchgpipe
        assert step is not None
        with pin_rank(None):
            return median_time(lambda: step(self.images, self.labels), self.steps)


def _rank(rank: int, put: Callable[[Any], None], name: str, rounds: int, steps: int) -> None:
    with pin_rank(rank):
        dist.init_process_group("gloo")
        contenders = Schedules(rank, WORKS[name], steps)
        contenders.prepare()
        measured = [contenders.run() for _ in range(rounds)]
        if rank == 0:
            put(measured)
        dist.barrier()
        dist.destroy_process_group()


def measure(name: str, rounds: int, steps: int) -> dict[str, Any]:
    """Run the contenders; medians over the rounds."""
    (measured,) = run_two_ranks(_rank, name, rounds, steps)
    microbatches = WORKS[name].microbatches

    def ratio(one: str, other: str) -> float:
        return statistics.median(row[other] / row[one] for row in measured)

    rows = {}
    for contender in [key for key in measured[0] if key not in ("one process", "stages alone")]:
        kind = contender.removeprefix("raw ").replace("torchgpipe", "gpipe")
        rows[contender] = {
            "speed-up over one process": ratio(contender, "one process"),
            "share of the limit": ratio(contender, "stages alone") / fill(kind, 2, microbatches),
        }
    kinds = ("gpipe", "1f1b", "zero_bubble")
    against = {f"{kind} / raw": ratio(kind, f"raw {kind}") for kind in kinds}
    if "torchgpipe" in measured[0]:
        against["gpipe / torchgpipe"] = ratio("gpipe", "torchgpipe")
    recomputed = {kind: ratio(kind, f"{kind}, always") - 1 for kind in ("gpipe", "1f1b")}
    return {"network": name, "contenders": rows, "ours": against, "recomputation costs": recomputed}


def simulated(microbatches_per_rank: int = 2) -> list[dict[str, Any]]:
    """Bubbles and microbatches in flight on paper."""
    rows = []
    for ranks in (2, 4, 8, 16):
        count = microbatches_per_rank * ranks
        names: list[StepSchedule] = ["1f1b", "interleaved_1f1b", "zero_bubble"]
        tables = {
            "gpipe": [
                (*table.forward, *table.backward)
                for table in (gpipe(list(range(ranks)), rank, count) for rank in range(ranks))
            ]
        }
        placements = {name: list(range(ranks)) * (2 if name == "interleaved_1f1b" else 1) for name in names}
        tables |= {name: list(step_tables(name, placements[name], ranks, count)) for name in names}
        for name, table in tables.items():
            stages = max(action.stage for actions in table for action in actions) + 1
            result = simulate(table, chain(stages))
            rows.append(
                {
                    "schedule": name,
                    "P": ranks,
                    "M": count,
                    "bubble": round(result.bubble, 4),
                    "in flight on rank 0": result.in_flight[0] / (stages // ranks),
                }
            )
    return rows


def main() -> None:
    """Measure and print, one JSON object a network, then the simulated ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--networks", nargs="+", default=list(WORKS), choices=list(WORKS))
    arguments = parser.parse_args()
    for name in arguments.networks:
        print(json.dumps(measure(name, arguments.rounds, arguments.steps), indent=2), flush=True)
    for row in simulated():
        print(json.dumps(row))


if __name__ == "__main__":
    main()
