"""A cluster that asks for a checkpoint by a signal gets one, whatever each rank was doing when the signal came."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import Tensor

from tests import nets
from tests.fitting import Case, Layout, Record, assert_same_tensors, loaders, make_strategy, make_trainer
from tests.ranks import run_ranks

# Of plain Lightning, in this process.
pytestmark = pytest.mark.filterwarnings("ignore")

CASE = Case(module=nets.Classifier, train=nets.images40)


class Signalled(nets.Classifier):
    """Gets the signal before its network call on one rank, after it on the other."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == 0:
            os.kill(os.getpid(), signal.SIGUSR2)
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        return loss


def _train(rank: int, world: int, folder: Path) -> Any:
    _pretend_slurm(rank, world, folder)
    pl.seed_everything(1, verbose=False)
    before = signal.getsignal(signal.SIGUSR2)
    environment = SLURMEnvironment(requeue_signal=signal.SIGUSR2)
    module = Signalled()
    trainer = make_trainer(
        CASE, make_strategy(Layout(2, 1)), world, str(folder), Record(), plugins=[environment], num_nodes=1
    )
    trainer.fit(module, **loaders(CASE, 1))
    assert signal.getsignal(signal.SIGUSR2) == before
    return dict(module.state_dict())


def _pretend_slurm(rank: int, world: int, folder: Path) -> None:
    os.environ.update(
        SLURM_JOB_ID="7",
        SLURM_JOB_NAME="training",
        SLURM_NTASKS=str(world),
        SLURM_NTASKS_PER_NODE=str(world),
        SLURM_PROCID=str(rank),
        SLURM_LOCALID=str(rank),
        SLURM_NODEID="0",
        SLURM_NODELIST="127.0.0.1",
        PATH=f"{folder}:{os.environ['PATH']}",
    )


def test_the_file_is_written_between_two_batches_and_training_goes_on(tmp_path: Path) -> None:
    requeue = tmp_path / "scontrol"
    requeue.write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/requeued\n")
    requeue.chmod(0o755)
    states = run_ranks(2, _train, tmp_path)
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    (file,) = tmp_path.glob("hpc_ckpt_*.ckpt")
    checkpoint = torch.load(file, weights_only=True)
    # The ranks agree while the next batch runs.
    assert checkpoint["global_step"] == 4
    assert_same_tensors(checkpoint["state_dict"], _alone(4), 1e-10)
    # Training went on as if nothing had happened.
    for state in states:
        assert_same_tensors(state, _alone(5), 1e-10)


def _alone(steps: int) -> Any:
    pl.seed_everything(1, verbose=False)
    module = nets.Classifier()
    make_trainer(CASE, None, 1, "", Record(), max_steps=steps).fit(module, **loaders(CASE, 1))
    return dict(module.state_dict())
