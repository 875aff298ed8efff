"""A binding is carried out in a process, completely and repeatably."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_cnnpar.launchers import affinity, threads
from lightning_cnnpar.launchers.affinity import apply, original_mask
from lightning_cnnpar.launchers.binding import RankBinding, RankDevice
from lightning_cnnpar.launchers.pinning import is_narrowed

MASK = frozenset(os.sched_getaffinity(0))
needs_two_cpus = pytest.mark.skipif(len(MASK) < 2, reason="needs two CPUs")


@pytest.fixture(autouse=True)
def _restore_mask() -> Iterator[None]:
    yield
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), MASK)


def binding(cpus: frozenset[int], memory: str = "off", node: int | None = None) -> RankBinding:
    return RankBinding(local_rank=0, device=RankDevice(), node=node, cpus=cpus, threads=1, memory=memory)  # type: ignore[arg-type]


@needs_two_cpus
def test_all_threads_move_and_new_ones_follow() -> None:
    stop = threading.Event()
    waiting = threading.Thread(target=stop.wait)
    waiting.start()
    one = frozenset({min(MASK)})
    try:
        assert apply(binding(one), {}) == ()
        masks = {frozenset(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()}
        assert masks == {one}
        seen: list[frozenset[int]] = []
        new = threading.Thread(target=lambda: seen.append(frozenset(os.sched_getaffinity(0))))
        new.start()
        new.join()
        assert seen == [one]
    finally:
        stop.set()
        waiting.join()


@needs_two_cpus
def test_who_plans_again_starts_from_the_first_mask() -> None:
    environment: dict[str, str] = {}
    for cpu in sorted(MASK)[:2]:
        apply(binding(frozenset({cpu})), environment)
        assert os.sched_getaffinity(0) == {cpu}
        assert original_mask(MASK, environment) == (MASK, None)
    # Somebody else moved the process since: that is where it starts now.
    os.sched_setaffinity(0, {min(MASK)})
    assert original_mask(MASK, environment)[0] == {min(MASK)}


def test_an_applied_mask_is_left_alone() -> None:
    environment: dict[str, str] = {}
    assert apply(binding(MASK), environment) == ()
    assert environment == {}


@needs_two_cpus
@pytest.mark.parametrize(("name", "widened"), [("OMP_PROC_BIND", True), ("GOMP_CPU_AFFINITY", True), ("OTHER", False)])
def test_a_process_that_openmp_moved_to_one_cpu_is_known(name: str, widened: bool) -> None:
    os.sched_setaffinity(0, {min(MASK)})
    mask, warning = original_mask(MASK, {name: "true"})
    assert mask == (MASK if widened else {min(MASK)})
    assert (warning is not None and f"Unset {name}" in warning) == widened


def test_cpus_that_are_refused_are_a_warning() -> None:
    (warning,) = apply(binding(frozenset({1023})), {})
    assert warning == "rank can't be moved to CPUs 1023: Invalid argument."
    assert os.sched_getaffinity(0) == MASK


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").exists(), reason="needs a kernel with NUMA nodes")
def test_the_memory_policy_is_set_and_taken_back() -> None:
    def policy() -> str:
        return Path("/proc/self/numa_maps").read_text().split()[1]

    refused = apply(binding(MASK, "bind", 0), {})
    try:
        if any("EPERM" in refusal or "ENOSYS" in refusal for refusal in refused):
            pytest.skip(refused[0])
        assert refused == ()
        assert policy() == "bind:0"
        assert apply(binding(MASK, "preferred", 0), {}) == ()
        assert policy() == "prefer:0"
    finally:
        assert apply(binding(MASK), {}) == ()
    assert policy() == "default"


def test_a_refused_memory_policy_is_a_warning() -> None:
    (warning,) = apply(binding(MASK, "preferred", 900), {})
    assert warning.startswith("memory policy 'preferred' for node 900 was refused (E")
    assert warning.endswith("memory is left to the system.")


def test_an_unknown_processor_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity.platform, "machine", lambda: "vax")
    assert apply(binding(MASK, "bind", 0), {}) == (
        "memory policy 'bind' is not known on vax: memory is left to the system.",
    )


def test_threads_are_chosen_once_and_by_the_user_first() -> None:
    environment: dict[str, str] = {}
    threads.reserve_threads(2, environment)
    assert environment["OMP_NUM_THREADS"] == str(max(1, len(MASK) // 2))
    assert not threads.chosen_by_user(environment)
    assert threads.use_threads(3, environment) == torch.get_num_threads() == 3
    threads.reserve_threads(2, environment)
    assert environment["OMP_NUM_THREADS"] == "3"
    environment["OMP_NUM_THREADS"] = "2"
    assert threads.chosen_by_user(environment)
    assert threads.use_threads(1, environment) == 3
    assert environment["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("parent", "environment", "users"),
    [
        (b"A=1\0", {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, False),
        (b"OMP_NUM_THREADS=1\0", {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, True),
        (b"A=1\0", {"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "x"}, True),
        (b"A=1\0", {"OMP_NUM_THREADS": "1"}, True),
        (b"A=1\0", {}, False),
    ],
)
def test_what_torchrun_sets_by_default_is_not_the_users(
    parent: bytes, environment: dict[str, str], users: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda self: parent)
    assert threads.chosen_by_user(environment) == users


@pytest.mark.parametrize(
    ("mask", "parent", "environment", "narrowed"),
    [
        ({0, 1}, {0, 1}, {}, False),
        ({0}, {0, 1}, {}, True),
        ({0}, set(), {}, False),
        ({0}, {0, 1}, {"SLURM_CPU_BIND_TYPE": "none"}, False),
        ({0, 1}, {0, 1}, {"SLURM_CPU_BIND_LIST": "0x3,0xC", "SLURM_CPU_BIND_TYPE": "mask_cpu:"}, True),
        ({0, 1}, {0, 1, 2}, {"SLURM_CPU_BIND_LIST": "0x3,0x3", "SLURM_CPU_BIND_TYPE": "mask_cpu:"}, False),
    ],
)
def test_a_mask_of_its_own_is_told_from_a_shared_one(
    mask: set[int], parent: set[int], environment: dict[str, str], narrowed: bool
) -> None:
    assert is_narrowed(frozenset(mask), frozenset(parent), environment) == narrowed
