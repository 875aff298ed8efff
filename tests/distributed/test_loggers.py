"""Loggers get one run with one process's values, however the ranks were started."""

import csv
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_cnnpar import HybridStrategy
from tests.ranks import run_ranks

STARTED = ("popen", "torchrun")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a folder of logs for one process and for each way to start 2 x 2 ranks."""
    folder = tmp_path_factory.mktemp("logs")
    run_ranks(1, _train_alone, folder / "alone", initialize=False)
    run_ranks(4, _train, folder / "torchrun", initialize=False)
    command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.logged", str(folder / "popen")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, timeout=100, capture_output=True)
    return folder


def _train_alone(rank: int, world: int, folder: Path) -> None:
    from tests.distributed.logged import train

    train(folder, "auto", 1, 1)


def _train(rank: int, world: int, folder: Path) -> None:
    from tests.distributed.logged import train

    train(folder, HybridStrategy(2, 2), world, 2)


@pytest.mark.parametrize("started", STARTED)
def test_csv_and_tensorboard_get_the_values_of_one_process(folder: Path, started: str) -> None:
    assert _csv_rows(folder / started) == [_close(row) for row in _csv_rows(folder / "alone")]
    assert _events(folder / started) == [_close(event) for event in _events(folder / "alone")]
    hyperparameters = "csv/version_0/hparams.yaml"
    assert Path(folder, started, hyperparameters).read_text() == Path(folder, "alone", hyperparameters).read_text()


@pytest.mark.case("C41")
@pytest.mark.parametrize("started", STARTED)
def test_case_c41_wandb_gets_one_run_with_the_values_of_one_process(folder: Path, started: str) -> None:
    config, history = _wandb_run(folder / started)
    expected_config, expected = _wandb_run(folder / "alone")
    assert config["width"] == expected_config["width"] == "3"
    assert len(history) == len(expected) >= 8
    assert history == [_close(row) for row in expected]


def _close(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _close(value) for key, value in values.items()}
    if isinstance(values, tuple):
        return tuple(_close(value) for value in values)
    # Loggers get float32.
    return pytest.approx(values, rel=2e-6) if isinstance(values, float) else values


def _csv_rows(folder: Path) -> list[dict[str, float]]:
    (file,) = folder.rglob("metrics.csv")
    with file.open() as lines:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(lines)]


def _events(folder: Path) -> list[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    return [(tag, e.step, e.value) for tag in sorted(events.Tags()["scalars"]) for e in events.Scalars(tag)]


def _wandb_run(folder: Path) -> tuple[dict[str, str], list[dict[str, float]]]:
    """Configuration and rows of the only run in the folder."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.rglob("run-*.wandb")
    config: dict[str, str] = {}
    rows = []
    for data in _records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        for changed in (record.config.update, record.run.config.update):
            config.update({item.key: item.value_json for item in changed})
        row = {".".join([item.key, *item.nested_key]).strip("."): item.value_json for item in record.history.item}
        if row:
            rows.append({key: float(json.loads(text)) for key, text in row.items() if not key.startswith("_")})
    return config, rows


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a W&B file: a header of 7 bytes, then the log format of LevelDB.

    block of 32 KiB    crc (4) | length (2) | kind (1) | part of a record | crc ...
    kind               1 whole record, 2 first, 3 middle, 4 last part of one
    """
    assert data[:4] == b":W&B"
    position, block, record = 7, 32768, b""
    while position + 7 <= len(data):
        if block - position % block < 7:
            position += block - position % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield record
            record = b""
