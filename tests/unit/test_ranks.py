"""The rank harness itself: results, failures, deaths and hangs."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.ranks import RankError, run_ranks


class NoSuchStageError(ValueError):
    """An error of the package's kind: built from values, so that a copy of it takes some care."""


def _sum(rank: int, world_size: int, value: torch.Tensor) -> torch.Tensor:
    result = value + rank
    dist.all_reduce(result)
    return result


def _settings(rank: int, world_size: int) -> tuple[str, str, int]:
    return os.environ["CHOSEN"], os.environ["WORLD_SIZE"], torch.get_num_threads()


def _raise_on(rank: int, world_size: int, failing: int) -> None:
    if rank == failing:
        raise NoSuchStageError("no stage 7")
    time.sleep(60)


def _die_on(rank: int, world_size: int, failing: int) -> None:
    if rank == failing:
        os.kill(os.getpid(), signal.SIGKILL)


def _hang(rank: int, world_size: int) -> None:
    time.sleep(60)


def test_returns_results_in_order_of_ranks() -> None:
    assert run_ranks(2, _settings_free, 3) == [(0, 2, 3), (1, 2, 3)]


def _settings_free(rank: int, world_size: int, value: int) -> tuple[int, int, int]:
    return rank, world_size, value


def test_ranks_communicate() -> None:
    for result in run_ranks(3, _sum, torch.ones(2)):
        assert result.tolist() == [6.0, 6.0]


def test_ranks_see_the_environment_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHOSEN", "here")
    assert run_ranks(1, _settings) == [("here", "1", 1)]


def test_the_first_failing_rank_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE", 0.2)
    with pytest.raises(RankError, match=r"(?s)^rank 1: Traceback.*no stage 7.*then rank 0: had not ended") as caught:
        run_ranks(2, _raise_on, 1)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, NoSuchStageError)


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RankError, match="rank 1: ended before it returned, killed by SIGKILL"):
        run_ranks(2, _die_on, 1)


def test_a_hang_ends_at_the_timeout_and_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 0: had not returned after 4 s.*in _hang"):
        run_ranks(2, _hang, timeout=4)
    assert time.monotonic() - begin < 15


@pytest.mark.parametrize("initialize", [True, False])
def test_the_group_can_be_left_to_the_function(initialize: bool) -> None:
    assert run_ranks(2, _initialize, not initialize, initialize=initialize) == [2, 2]


def _initialize(rank: int, world_size: int, needed: bool) -> int:
    if needed:
        dist.init_process_group("gloo")
    # A rank that leaves while the other one is still connecting closes the connection.
    dist.barrier()
    return dist.get_world_size()
