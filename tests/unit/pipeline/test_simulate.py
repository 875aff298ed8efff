import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cnnpar.pipeline.schedules import Action, gpipe
from lightning_cnnpar.pipeline.simulate import DeadlockError, chain, ideal_bubble, simulate


def _tables(stage_ranks: list[int], num_ranks: int, microbatches: int) -> list[list[Action]]:
    tables = [gpipe(stage_ranks, rank, microbatches) for rank in range(num_ranks)]
    return [[*table.forward, *table.backward] for table in tables]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 7])
def test_gpipe_has_the_ideal_bubble(ranks: int, microbatches: int) -> None:
    result = simulate(_tables(list(range(ranks)), ranks, microbatches), chain(ranks))
    assert result.bubble == pytest.approx(ideal_bubble(ranks, microbatches))
    assert result.makespan == 3 * (microbatches + ranks - 1)
    assert list(result.in_flight) == [microbatches] * ranks


def test_spans_follow_the_picture() -> None:
    result = simulate(_tables([0, 1], 2, 2), chain(2))
    assert result.spans[1][Action("F", 1, 0)] == (1, 2)
    assert result.spans[1][Action("B", 1, 1)] == (3, 5)
    assert result.spans[0][Action("B", 0, 0)] == (7, 9)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_gpipe_never_deadlocks(data: st.DataObject) -> None:
    """Any placement, with skips between any stages."""
    num_ranks = data.draw(st.integers(1, 4))
    stage_ranks = data.draw(st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=8))
    microbatches = data.draw(st.integers(1, 5))
    sources = {s: data.draw(st.lists(st.integers(0, s - 1), unique=True)) if s else [] for s in range(len(stage_ranks))}
    result = simulate(_tables(stage_ranks, num_ranks, microbatches), sources)
    assert sum(len(span) for span in result.spans) == 2 * microbatches * len(stage_ranks)
    assert 0 <= result.bubble < 1
    assert list(result.in_flight) == [microbatches * stage_ranks.count(rank) for rank in range(num_ranks)]


def test_ranks_in_the_wrong_order_deadlock() -> None:
    tables = [[Action("F", 2, 0), Action("F", 0, 0)], [Action("F", 1, 0)]]
    with pytest.raises(
        DeadlockError, match=r"rank 0 is at F2.0 and waits for F1.0; rank 1 is at F1.0 and waits for F0.0"
    ):
        simulate(tables, chain(3))
