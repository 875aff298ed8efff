"""Speed of a training step on two ranks with one thread each, as ratios measured side by side in one run.

    python -m benchmarks.pipeline [--rounds 5] [--steps 6] [--networks resnet unet]

Contenders take turns, round by round, so drift of the machine meets all of them:

    one process    the network whole, plain PyTorch, batch B, the other core idle                  1.00 by definition
    two alone      the same with B / 2 on each core, nothing exchanged: what two cores are worth on this machine
    stages alone   both stages at once, M microbatches forward and backward each, nothing exchanged
    ours P=2       `HybridStrategy`, two stages, M microbatches, batch B
    raw GPipe      `torch.distributed.pipelining`, the same cut, the same M, batch B
    ddp            Lightning's `ddp`, two replicas, batch B / 2 each
    ours D=2       `HybridStrategy`, two replicas, batch B / 2 each

The limit of two stages is the time of the slower stage alone times the ideal bubble's (M + P - 1) / M: what is above it
is the cost of sending, of the loss and the optimizer, and of waiting. The limit of two replicas is "two alone".
"""

import argparse
import contextlib
import copy
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet50

from benchmarks.two_ranks import run_two_ranks
from lightning_cnnpar import HybridStrategy
from lightning_cnnpar.partition.split import Partitioner
from lightning_cnnpar.partition.stage import Program

WARM_UP = 2


def unet() -> nn.Module:
    """A U-Net-like network: four levels with skips."""
    from tests.nets import UNet

    return UNet(norm=True, width=24, classes=4)


def segmentation_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each pixel against the image's class."""
    target = (labels % outputs.shape[1]).view(-1, 1, 1).expand(-1, *outputs.shape[2:])
    return F.cross_entropy(outputs, target)


@dataclasses.dataclass(frozen=True)
class Work:
    """A network and a batch."""

    network: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: int
    size: int
    microbatches: int


WORKS = {
    "resnet": Work(resnet50, F.cross_entropy, batch=16, size=96, microbatches=4),
    "unet": Work(unet, segmentation_loss, batch=16, size=64, microbatches=4),
}


class Module(pl.LightningModule):
    """The network, a loss, SGD; notes the time of each step."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.model = work.network()
        self.work = work
        self.times: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a batch."""
        images, labels = batch
        return self.work.loss(self.model(images), labels)

    def configure_optimizers(self) -> Any:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        self._begin = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop the clock."""
        self.times.append(time.perf_counter() - self._begin)


class Contenders:
    """What each rank runs, by name; every call returns seconds per step."""

    def __init__(self, rank: int, work: Work, steps: int) -> None:
        self.rank = rank
        self.work = work
        self.steps = steps
        torch.manual_seed(0)
        self.network = work.network()
        self.images = torch.randn(work.batch, 3, work.size, work.size)
        self.labels = torch.randint(0, 4, (work.batch,))
        self.program = Partitioner(self.network, 2).program((self.images,), {})
        self.balances: list[float] = []
        self._raw = RawGPipe(rank, self.network, self.program, work, self.images)

    def run(self) -> dict[str, float]:
        """One round."""
        return {
            "one process": self.alone(),
            "two alone": self._two_alone(),
            "stages alone": self.stages_alone(),
            "ours P=2": self.fit(HybridStrategy(2, 1, num_microbatches=self.work.microbatches), 1),
            "raw GPipe": self.timed(lambda: self._raw.step(self.images, self.labels)),
            "ddp": self.fit("ddp", 2),
            "ours D=2": self.fit(HybridStrategy(1, 2), 2),
        }

    def stages_alone(self) -> float:
        """The slower stage's time; notes the balance."""
        program, work = self.program, self.work
        stage = program.stages[self.rank]
        received: list[list[Tensor]] = [[] for _ in range(work.microbatches)]
        images = self.images.chunk(work.microbatches)
        if self.rank == 1:
            with torch.no_grad():
                for m, part in enumerate(images):
                    values = dict(
                        zip(program.stages[0].sends, program.stages[0](self.network, [part], [])[0], strict=True)
                    )
                    received[m] = [values[name].requires_grad_() for name in stage.receives]

        def step() -> None:
            made = []
            for part, values in zip(images, received, strict=True):
                sent, outputs = stage(self.network, [part] if stage.inputs else [], values)
                made.append([tensor for tensor in (*sent, *outputs) if tensor.requires_grad])
            for tensors in made:
                torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])

        own = self.timed(step)
        times = [torch.zeros(1, dtype=torch.float64) for _ in range(2)]
        dist.all_gather(times, torch.tensor([own], dtype=torch.float64))
        seconds = [float(one) for one in times]
        self.balances.append(statistics.mean(seconds) / max(seconds))
        return max(seconds)

    def alone(self) -> float:
        """Seconds of a step of the whole network on rank 0, the other core idle."""
        seconds = median_time(self._whole_step(self.work.batch), self.steps) if self.rank == 0 else 0.0
        dist.barrier()
        return seconds

    def fresh_network(self) -> nn.Module:
        """The network with the weights of the others."""
        return copy.deepcopy(self.network)

    def _two_alone(self) -> float:
        return self.timed(self._whole_step(self.work.batch // 2))

    def _whole_step(self, batch: int) -> Callable[[], None]:
        network = self.work.network()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01)

        def step() -> None:
            optimizer.zero_grad()
            self.work.loss(network(self.images[:batch]), self.labels[:batch]).backward()
            optimizer.step()

        return step

    def timed(self, step: Callable[[], None]) -> float:
        """Seconds of a step that both ranks run."""
        dist.barrier()
        return median_time(step, self.steps)

    def fit(self, strategy: Any, replicas: int) -> float:
        """Seconds of a step of a Trainer."""
        dist.barrier()
        per_replica = self.work.batch // replicas
        count = (self.steps + WARM_UP) * self.work.batch
        data = TensorDataset(self.images[:1].expand(count, -1, -1, -1), self.labels[:1].expand(count))
        module = Module(self.work)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with contextlib.redirect_stdout(None):
            trainer.fit(module, DataLoader(data, per_replica))
        return statistics.median(module.times[WARM_UP:])


class RawGPipe:
    """`torch.distributed.pipelining` with our cut."""

    def __init__(self, rank: int, network: nn.Module, program: Program, work: Work, images: Tensor) -> None:
        self.rank = rank
        stage = StageModule(network, program, rank)
        own = nn.ModuleList(network.get_submodule(name) for name in program.stages[rank].modules)
        self._optimizer = torch.optim.SGD(own.parameters(), lr=0.01)
        self._stage = PipelineStage(stage, rank, 2, torch.device("cpu"))
        self._schedule = ScheduleGPipe(self._stage, n_microbatches=work.microbatches, loss_fn=work.loss)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One training step."""
        self._optimizer.zero_grad()
        if self.rank == 0:
            self._schedule.step(images)
        else:
            self._schedule.step(target=labels, losses=[])
        self._optimizer.step()


class _Dense(torch.autograd.Function):
    """Nothing but a dense gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class StageModule(nn.Module):
    """A stage as the module that the library wants: several values travel as a tuple."""

    def __init__(self, network: nn.Module, program: Program, rank: int) -> None:
        super().__init__()
        self.network = network
        self.stage = program.stages[rank]
        later = program.stages[rank + 1].receives if self.stage.sends else ()
        self.order = [self.stage.sends.index(name) for name in later]

    def forward(self, *values: Tensor) -> Any:
        """Run the stage."""
        # The library sends strided values and gradients as they are, which its transport refuses.
        values = tuple(_Dense.apply(value) for value in values)
        taken = len(self.stage.inputs)
        sent, outputs = self.stage(self.network, values[:taken], values[taken:])
        # In the order in which the next stage takes them.
        made = (*(sent[i].contiguous() for i in self.order), *outputs)
        return made if len(made) > 1 else made[0]


def median_time(step: Callable[[], None], steps: int) -> float:
    """Median of the seconds that calls take, after some that don't count."""
    times = []
    for _ in range(steps + WARM_UP):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM_UP:])


_ALL_CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@contextlib.contextmanager
def pin_rank(rank: int | None) -> Iterator[None]:
    """Run on a core of the rank's own; on all of them for `None`."""
    if len(_ALL_CPUS) < 2:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(_ALL_CPUS) if rank is None else {_ALL_CPUS[rank % len(_ALL_CPUS)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _rank(rank: int, put: Callable[[Any], None], name: str, rounds: int, steps: int) -> None:
    with pin_rank(rank):
        _measure(rank, put, name, rounds, steps)


def _measure(rank: int, put: Callable[[Any], None], name: str, rounds: int, steps: int) -> None:
    dist.init_process_group("gloo")
    contenders = Contenders(rank, WORKS[name], steps)
    measured = [contenders.run() for _ in range(rounds)]
    if rank == 0:
        put((measured, statistics.median(contenders.balances)))
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, rounds: int, steps: int) -> dict[str, Any]:
    """Run the contenders for one network; medians over the rounds of each round's ratio to one process."""
    ((measured, balance),) = run_two_ranks(_rank, name, rounds, steps)
    ratios = {
        contender: statistics.median(one["one process"] / one[contender] for one in measured)
        for contender in measured[0]
    }
    microbatches = WORKS[name].microbatches
    filled = microbatches / (microbatches + 1)

    def ratio(contender: str, other: str) -> float:
        return statistics.median(one[other] / one[contender] for one in measured)

    return {
        "network": name,
        "seconds of one process": statistics.median(one["one process"] for one in measured),
        "speed-up": ratios,
        "balance": balance,
        "limit of P=2": ratios["stages alone"] * filled,
        "ours P=2 / limit": ratio("ours P=2", "stages alone") / filled,
        "ours P=2 / raw GPipe": ratio("ours P=2", "raw GPipe"),
        "ours D=2 / limit": ratio("ours D=2", "two alone"),
        "ours D=2 / ddp": ratio("ours D=2", "ddp"),
    }


def main() -> None:
    """Measure and print, one JSON object a network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--networks", nargs="+", default=list(WORKS), choices=list(WORKS))
    arguments = parser.parse_args()
    for name in arguments.networks:
        print(json.dumps(measure(name, arguments.rounds, arguments.steps), indent=2), flush=True)


if __name__ == "__main__":
    main()
