"""Every way to start ranks gives the same numbers, and a rank that fails ends all of them at once, by name."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from tests import nets
from tests.fitting import Case, Layout, Record, assert_same_tensors, fit_alone, make_strategy, make_trainer
from tests.ranks import run_ranks

SCRIPT = "tests.distributed.launched"
PAIR = {"pipeline_parallel_size": 2, "data_parallel_size": 1}


@dataclasses.dataclass(frozen=True)
class Finished:
    """What a script left behind."""

    code: int
    out: str
    err: str
    ended: float

    @property
    def losses(self) -> list[str]:
        return re.findall(r"train_loss (\S+)", self.out)

    @property
    def weights(self) -> list[str]:
        return re.findall(r"weight sum (\S+)", self.out)

    @property
    def seconds_since_fault(self) -> float:
        (fault,) = re.findall(r"fault at (\S+)", self.out)
        return self.ended - float(fault)

    def wait_for_all_ranks(self, limit: float) -> bool:
        """Whether the processes of all ranks are gone within a time."""
        pids = re.findall(r"rank \d+ has pid (\d+)", self.out)
        assert len(pids) >= 2
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            if time.time() - self.ended > limit:
                return False
            time.sleep(0.1)
        return True


def start(launcher: list[str], *arguments: str, fault: str | None = None) -> Finished:
    command = [sys.executable, "-W", "ignore", *launcher, SCRIPT, *arguments, *(["--fault", fault] if fault else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return Finished(process.returncode, out, err, time.time())


@pytest.fixture(scope="module")
def alone() -> Finished:
    """One process."""
    return start(["-m"], "auto", "1")


@pytest.mark.parametrize(("name", "fits"), [("cnnpar_hybrid", 2), ("cnnpar_hybrid_fork", 1)])
def test_a_name_works_without_an_import(name: str, fits: int, alone: Finished) -> None:
    finished = start(["-m"], name, "2", "--fits", str(fits))
    assert finished.code == 0, finished.err
    assert "HybridStrategy" in finished.out
    assert finished.losses == fits * alone.losses
    assert finished.weights == fits * alone.weights
    # Nobody else on the network can reach the ranks of one machine.
    assert set(re.findall(r"listens on (\[[^\]]*\])", finished.out)) == {"['0100007F']"}


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


@pytest.mark.parametrize(
    ("method", "fault"),
    [("popen", "raise@1"), ("popen", "kill@0"), ("spawn", "raise@1"), ("fork", "kill@1"), ("torchrun", "kill@1")],
)
def test_all_ranks_train_and_end_within_seconds_of_a_failure(method: str, fault: str, alone: Finished) -> None:
    launcher, options = (TORCHRUN, PAIR) if method == "torchrun" else (["-m"], {**PAIR, "start_method": method})
    finished = start(launcher, "-", "2", "--options", repr(options), fault=fault)
    assert finished.losses == alone.losses
    assert finished.code != 0
    assert finished.seconds_since_fault < 30
    assert finished.wait_for_all_ranks(limit=30)
    rank = fault[-1]
    named = rf"rank {rank} \(replica 0, stage rank {rank}"
    if method == "torchrun":
        # It ends the other ranks itself before they can say anything, and names the first to fail.
        named = rf"Root Cause[^.]*rank\s+: {rank} "
    assert re.search(named, finished.err), finished.err
    if fault.startswith("raise"):
        # The mistake itself comes first, what followed from it later.
        first, *_ = re.findall(r"^.*(?:Error|Exception): .*$", finished.err, re.MULTILINE)
        assert "the user's own mistake" in first, finished.err
    else:
        assert re.search("killed, or out of memory|SIGKILL", finished.err), finished.err


def test_two_nodes_of_two_ranks_hold_a_replica_each() -> None:
    expected = fit_alone(NODES)
    for rank, (coordinates, loader_reads, state) in enumerate(run_ranks(4, _fit_on_two_nodes)):
        assert coordinates == (rank // 2, rank % 2)
        assert loader_reads == (rank % 2 == 0)
        assert_same_tensors(state, expected.state, 1e-10)


NODES = Case(module=nets.Classifier, train=nets.images40)


def _fit_on_two_nodes(rank: int, world: int) -> Any:
    os.environ.update(
        LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2", GROUP_RANK=str(rank // 2), NODE_RANK=str(rank // 2)
    )
    pl.seed_everything(1, verbose=False)
    strategy = make_strategy(Layout(2, 2))
    trainer = make_trainer(NODES, strategy, 2, "", Record(), num_nodes=2)
    module = nets.Classifier()
    read: list[int] = []
    images = Noted(40)
    images.read = read
    trainer.fit(module, DataLoader(images, 4))
    assert trainer.world_size == 4
    return (strategy.mesh.data_rank, strategy.mesh.pipeline_rank), bool(read), dict(module.state_dict())


class Noted(nets.Images):
    """Notes what is read."""

    read: list[int]

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return super().__getitem__(index)
