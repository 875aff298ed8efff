"""Ranks have their share of the processors, however they are started, and so have the processes that they start."""

import json
import os
import subprocess
import sys
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_cnnpar import HybridStrategy, NumaBinding
from lightning_cnnpar.launchers.pinning import bind_rank
from lightning_cnnpar.launchers.topology import read_topology
from tests.fitting import QUIET
from tests.ranks import run_ranks

MASK = frozenset(os.sched_getaffinity(0))
CORES = sum(1 for core in read_topology().cores if core & MASK)
RANKS = 4
CORES_OF_THEIR_OWN = NumaBinding(mode="cores", memory="off")


class Masks(Dataset[Any]):
    """Each sample is the CPUs that the process which reads it may run on."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(cpu in os.sched_getaffinity(0)) for cpu in range(max(MASK) + 1)])


class Recorder(pl.LightningModule):
    """Notes what its rank may use while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_train_start(self) -> None:
        loader = DataLoader(Masks(), batch_size=None, num_workers=1)
        workers = [{cpu for cpu, allowed in enumerate(mask.tolist()) if allowed} for mask in loader]
        strategy = self.trainer.strategy
        assert isinstance(strategy, HybridStrategy)
        before = os.sched_getaffinity(0)
        if strategy.options.numa != "off":
            bind_rank(strategy)
        self.found = {
            "rank": self.global_rank,
            "cpus": sorted(before),
            "again": sorted(os.sched_getaffinity(0)),
            "workers": [sorted(mask) for mask in workers],
            "threads": torch.get_num_threads(),
            "variable": os.environ.get("OMP_NUM_THREADS"),
        }


def train(numa: Any = "auto", devices: int = RANKS, fits: int = 1, **options: Any) -> dict[str, Any]:
    """Fit on the CPU, and return what the rank of this process could use."""
    warnings.simplefilter("ignore")  # Lightning's advice on loggers and workers
    for _ in range(fits):
        strategy = HybridStrategy(pipeline_parallel_size=1, numa=numa, **options)
        trainer = pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_steps=1, **QUIET)
        module = Recorder()
        trainer.fit(module, DataLoader(torch.ones(8, 2), 2))
    return module.found


def assert_fair(found: list[dict[str, Any]], *, narrowed: bool) -> None:
    assert len(found) == RANKS
    for one in found:
        assert one["threads"] <= max(1, CORES / RANKS)
        assert one["variable"] == str(one["threads"])
        assert one["again"] == one["cpus"]
        assert one["workers"] == 2 * [one["cpus"]]
    users = [sum(cpu in one["cpus"] for one in found) for cpu in MASK]
    if narrowed:
        # Every CPU is somebody's; none is another's too, unless ranks outnumber cores.
        assert max(users) - min(users) <= 1
        assert min(users) >= 1
        assert max(users) <= max(1, -(-RANKS // CORES))
    else:
        assert users == len(MASK) * [RANKS]


@pytest.mark.case("C50")
@pytest.mark.parametrize(("numa", "narrowed"), [("auto", False), (CORES_OF_THEIR_OWN, True)])
def test_ranks_that_an_agent_started(numa: Any, narrowed: bool) -> None:
    if len(read_topology().nodes) > 1:
        narrowed = True
    assert_fair(run_ranks(RANKS, _train, numa), narrowed=narrowed)


def _train(rank: int, world: int, numa: Any) -> dict[str, Any]:
    # As torchrun starts ranks where a user said nothing.
    del os.environ["OMP_NUM_THREADS"]
    return train(numa, fits=2)


@pytest.mark.case("C50")
@pytest.mark.parametrize("method", ["popen", "fork"])
def test_ranks_that_lightning_starts(method: str) -> None:
    found, text = start("--method", method)
    assert_fair(found, narrowed=True)
    assert text.count("nearest NIC") == 1
    if CORES < RANKS:
        assert text.count(f"{RANKS} ranks share") == 1


@pytest.mark.case("C50")
def test_a_number_of_threads_that_the_user_chose_is_kept() -> None:
    found, _ = start("--method", "popen", OMP_NUM_THREADS="2")
    # torch itself takes no more than there are CPUs.
    assert [one["threads"] for one in found] == RANKS * [min(2, len(MASK))]
    assert [one["variable"] for one in found] == RANKS * ["2"]


def test_off_leaves_everything_to_lightning() -> None:
    found, text = start("--method", "popen", "--numa", "off")
    assert [one["cpus"] for one in found] == RANKS * [sorted(MASK)]
    assert "NUMA" not in text


def test_one_rank_keeps_what_it_has() -> None:
    before = torch.get_num_threads()
    with warnings.catch_warnings():
        found = train(devices=1)
    assert found["cpus"] == sorted(MASK)
    assert found["threads"] == before == torch.get_num_threads()


def start(*arguments: str, **environment: str) -> tuple[list[dict[str, Any]], str]:
    """Run this file as a script: what its ranks could use, and all that it said."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.distributed.test_binding", *arguments]
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, env={**inherited, **environment}, text=True, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line.removeprefix("found ")) for line in done.stdout.splitlines() if line.startswith("found ")]
    return sorted(found, key=lambda one: one["rank"]), done.stdout + done.stderr


class Printer(Recorder):
    """Prints what it noted."""

    def on_train_start(self) -> None:
        super().on_train_start()
        sys.stdout.write(f"found {json.dumps(self.found)}\n")
        sys.stdout.flush()


def main(method: str, numa: Any) -> None:
    strategy = HybridStrategy(pipeline_parallel_size=1, numa=numa, start_method=method)  # type: ignore[arg-type]
    trainer = pl.Trainer(accelerator="cpu", devices=RANKS, strategy=strategy, max_steps=1, **QUIET)
    trainer.fit(Printer(), DataLoader(torch.ones(8, 2), 2))


if __name__ == "__main__":
    words = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    main(words["--method"], words.get("--numa", CORES_OF_THEIR_OWN))
