"""A signal that announces the end of a job: one checkpoint, every rank ends, and the exit code says "start again"."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_cnnpar.launchers.preempted import EXIT_CODE, Preempted
from tests import nets
from tests.fitting import Case, Layout, loaders, make_strategy
from tests.ranks import run_ranks

PAIR = {"pipeline_parallel_size": 2, "data_parallel_size": 1}
REPLICAS = {"pipeline_parallel_size": 1, "data_parallel_size": 2}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


def run(method: str, folder: Path, wanted: str | None, options: dict[str, Any], devices: int = 2) -> Any:
    launcher = TORCHRUN if method == "torchrun" else ["-m"]
    script = ["tests.distributed.preempted", method, str(devices), str(folder), "--options", repr(options)]
    command = [sys.executable, "-W", "ignore", *launcher, *script, *(["--wanted", wanted] if wanted else [])]
    with subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, out, err


class Signalled(nets.Classifier):
    """Gets a signal before its network call on one rank."""

    where = 1
    at = 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.at and self.global_rank == self.where and self.global_step < 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


CASE = Case(module=Signalled, train=nets.images40, batch=4)


def _preempted(rank: int, world: int, layout: Layout, folder: Path, more: dict[str, Any]) -> Any:
    module = Signalled()
    module.where = min(1, world - 1)
    before = signal.getsignal(signal.SIGTERM)
    callback = ModelCheckpoint(folder, every_n_train_steps=100)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=make_strategy(layout),
        max_epochs=1,
        logger=False,
        callbacks=[callback],
        enable_progress_bar=False,
        enable_model_summary=False,
        precision="64-true",
        **more,
    )
    code = 0
    try:
        trainer.fit(module, **loaders(CASE, layout.data))
    except Preempted as preempted:
        code = preempted.code
    ignored = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, before)
    return code, trainer.global_step, ignored


@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(2, 1), Layout(1, 2), Layout(2, 2)])
def test_all_ranks_end_at_the_same_batch_with_one_checkpoint(layout: Layout, tmp_path: Path) -> None:
    reports = run_ranks(layout.world, _preempted, layout, tmp_path, {})
    # Noted in batch 2, agreed while batch 3 runs; one rank has nobody to agree with.
    step = 3 if layout.world == 1 else 4
    assert reports == [(EXIT_CODE, step, True)] * layout.world
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == step


def test_gradients_that_are_accumulated_are_not_lost(tmp_path: Path) -> None:
    reports = run_ranks(2, _preempted, Layout(2, 1), tmp_path, {"accumulate_grad_batches": 3})
    # Agreed at the end of batch 3; the optimizer steps after batch 5.
    assert reports == [(EXIT_CODE, 2, True)] * 2


def test_a_run_that_ends_by_itself_is_not_preempted(tmp_path: Path) -> None:
    reports = run_ranks(2, _preempted, Layout(2, 1), tmp_path, {"limit_train_batches": 3})
    assert [code for code, *_ in reports] == [0, 0]


@pytest.mark.parametrize(
    ("method", "wanted", "options"),
    [
        ("popen", "SIGTERM@0@3", PAIR),
        ("popen", "SIGUSR1@all@3", REPLICAS),
        ("spawn", "SIGTERM@parent@3", REPLICAS),
        ("torchrun", "SIGTERM@1@3", REPLICAS),
    ],
)
def test_every_way_to_start_ranks_ends_with_a_code_that_asks_for_another_start(
    method: str, wanted: str, options: dict[str, Any], tmp_path: Path
) -> None:
    code, out, err = run(method, tmp_path, wanted, options)
    assert "weight sum" not in out
    if method == "torchrun":
        # It has a code of its own, and names that of the rank.
        assert code == 1, err
        assert re.search(rf"exitcode\s+: {EXIT_CODE}", err), err
    else:
        assert code == EXIT_CODE, (code, err)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
    step = torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"]
    # A parent's signal takes its way.
    assert step == 5 or ("parent" in wanted and 5 <= step <= 11)
    assert method == "torchrun" or "Traceback" not in err, err
    if method != "popen":
        return
    code, out, err = run(method, tmp_path, None, options)
    assert code == 0, err
    assert "starts at step 5" in out
    assert "ended at epoch 1" in out


def test_the_code_is_that_of_a_temporary_failure() -> None:
    assert EXIT_CODE == 75
    assert Preempted("why").code == 75
    assert str(Preempted("why")) == "why"
