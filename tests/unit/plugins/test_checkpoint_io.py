"""A checkpoint file is whole or not there, and a damaged one is noticed."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cnnpar.plugins import checkpoint_io
from lightning_cnnpar.plugins.checkpoint_io import AtomicCheckpointIO, CorruptCheckpointError, is_undamaged


def contents(step: int) -> dict[str, Any]:
    return {"step": step, "weights": torch.full((300, 100), float(step)), "names": ["a", "b"]}


@pytest.fixture
def io() -> AtomicCheckpointIO:
    return AtomicCheckpointIO()


def write(folder: Path, *names: str) -> list[Path]:
    """Files with steps 1, 2, ..., each newer than the one before."""
    paths = []
    for step, name in enumerate(names, 1):
        paths.append(folder / name)
        AtomicCheckpointIO().save_checkpoint(contents(step), paths[-1])
        os.utime(paths[-1], (step, step))
    return paths


def test_the_file_is_an_ordinary_checkpoint(io: AtomicCheckpointIO, tmp_path: Path) -> None:
    (path,) = write(tmp_path / "new folder", "last.ckpt")
    for mmap in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mmap)
        assert loaded["step"] == 1
        assert torch.equal(loaded["weights"], contents(1)["weights"])
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("step", range(0, 120_000, 6_301))
def test_any_flipped_bit_is_noticed(tmp_path: Path, step: int) -> None:
    (path,) = write(tmp_path, "last.ckpt")
    data = bytearray(path.read_bytes())
    assert step < len(data) < 130_000
    assert is_undamaged(path)
    data[step] ^= 4
    path.write_bytes(data)
    assert not is_undamaged(path)


@pytest.mark.parametrize("length", [0, 1, 21, 22, 60_000, -1, -72, -95])
def test_a_cut_file_is_noticed(tmp_path: Path, length: int) -> None:
    (path,) = write(tmp_path, "last.ckpt")
    path.write_bytes(path.read_bytes()[:length])
    assert not is_undamaged(path)


def test_files_of_others_are_checked_by_their_records(io: AtomicCheckpointIO, tmp_path: Path) -> None:
    path = tmp_path / "plain.ckpt"
    torch.save(contents(3), path)
    assert io.load_checkpoint(path)["step"] == 3
    data = bytearray(path.read_bytes())
    data[60_000] ^= 1
    path.write_bytes(data)
    assert not is_undamaged(path)
    torch.save(contents(4), path, _use_new_zipfile_serialization=False)
    assert io.load_checkpoint(path)["step"] == 4


def test_a_damaged_file_is_replaced_by_the_newest_that_is_not(io: AtomicCheckpointIO, tmp_path: Path) -> None:
    oldest, older, newer, newest = write(tmp_path, "0.ckpt", "1.ckpt", "2.ckpt", "3.ckpt")
    assert io.load_checkpoint(newest)["step"] == 4
    for path in (newest, newer):
        path.write_bytes(path.read_bytes()[:5000])
    with pytest.warns(UserWarning, match=r"3\.ckpt is damaged.*1\.ckpt"):
        assert io.load_checkpoint(newest)["step"] == 2
    for path in (oldest, older):
        path.write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match=r"3\.ckpt is damaged.*no undamaged \*\.ckpt"):
        io.load_checkpoint(newest)
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(tmp_path / "4.ckpt")


def test_objects_are_refused_unless_asked_for(io: AtomicCheckpointIO, tmp_path: Path) -> None:
    path = tmp_path / "object.ckpt"
    io.save_checkpoint({"path": Path("x")}, path)
    with pytest.raises(pickle.UnpicklingError):
        io.load_checkpoint(path)
    assert io.load_checkpoint(path, weights_only=False) == {"path": Path("x")}


def test_an_error_while_writing_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = write(tmp_path, "last.ckpt")
    monkeypatch.setattr(checkpoint_io.torch, "save", fails)
    with pytest.raises(OSError, match="disk"):
        AtomicCheckpointIO().save_checkpoint(contents(2), path)
    assert AtomicCheckpointIO().load_checkpoint(path)["step"] == 1
    assert list(tmp_path.iterdir()) == [path]


def fails(checkpoint: Any, file: Any) -> None:
    file.write(b"some bytes")
    raise OSError("the disk is full")


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system takes root")
    try:
        (path,) = write(tmp_path, "last.ckpt")
        with pytest.raises((OSError, RuntimeError)):
            AtomicCheckpointIO().save_checkpoint({"weights": torch.zeros(200_000)}, path)
        assert AtomicCheckpointIO().load_checkpoint(path)["step"] == 1
        assert list(tmp_path.iterdir()) == [path]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def _write_for_ever(path: Path) -> None:
    for step in range(2, 1_000_000):
        AtomicCheckpointIO().save_checkpoint(contents(step), path)


def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    (path,) = write(tmp_path, "last.ckpt")
    context = multiprocessing.get_context("fork")
    seen = set()
    for instant in range(12):
        process = context.Process(target=_write_for_ever, args=(path,))
        process.start()
        before = path.stat().st_ino
        while path.stat().st_ino == before:
            time.sleep(0.001)
        time.sleep(0.0013 * instant)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        assert is_undamaged(path)
        seen.add(AtomicCheckpointIO().load_checkpoint(path)["step"])
    assert min(seen) >= 2


# ---- in the background -----------------------------------------------------------------------------------------------


def test_the_background_writes_the_state_of_the_moment(tmp_path: Path) -> None:
    io = AtomicCheckpointIO(background=True)
    weights = torch.zeros(300_000)
    shared = {"weights": weights, "same": weights, "list": [1]}
    for step in range(4):
        weights.fill_(step)
        io.save_checkpoint(shared, tmp_path / f"{step}.ckpt")
        if step:
            io.remove_checkpoint(tmp_path / f"{step - 1}.ckpt")
    weights.fill_(-1)
    shared["list"].append(2)  # type: ignore[attr-defined]
    io.teardown()
    (path,) = tmp_path.iterdir()
    loaded = torch.load(path, weights_only=True)
    assert loaded["weights"].eq(3).all()
    assert loaded["list"] == [1]
    assert loaded["weights"].data_ptr() == loaded["same"].data_ptr()


def test_a_file_that_is_still_being_written_can_be_read(tmp_path: Path) -> None:
    io = AtomicCheckpointIO(background=True)
    io.save_checkpoint(contents(5), tmp_path / "last.ckpt")
    assert io.load_checkpoint(tmp_path / "last.ckpt")["step"] == 5
    again = pickle.loads(pickle.dumps(io))
    again.save_checkpoint(contents(6), tmp_path / "last.ckpt")
    again.teardown()
    assert io.load_checkpoint(tmp_path / "last.ckpt")["step"] == 6


def test_an_error_in_the_background_is_raised(tmp_path: Path) -> None:
    io = AtomicCheckpointIO(background=True)
    (tmp_path / "file").write_text("")
    io.save_checkpoint(contents(1), tmp_path / "file" / "last.ckpt")
    with pytest.raises(OSError, match="file"):
        io.teardown()
    io.save_checkpoint(contents(1), tmp_path / "file" / "last.ckpt")
    with pytest.raises(OSError, match="file"):
        save_until_it_fails(io, tmp_path / "last.ckpt")
    io.teardown()


def save_until_it_fails(io: AtomicCheckpointIO, path: Path) -> None:
    for _ in range(1000):
        time.sleep(0.01)
        io.save_checkpoint(contents(2), path)


def _save_and_leave(path: Path) -> None:
    AtomicCheckpointIO(background=True).save_checkpoint(contents(7), path)


def test_the_last_file_is_written_before_the_process_ends(tmp_path: Path) -> None:
    process = multiprocessing.get_context("forkserver").Process(target=_save_and_leave, args=(tmp_path / "last.ckpt",))
    process.start()
    process.join(60)
    assert AtomicCheckpointIO().load_checkpoint(tmp_path / "last.ckpt")["step"] == 7
