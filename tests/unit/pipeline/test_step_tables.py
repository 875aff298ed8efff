"""Tables of the schedules that run the step for each microbatch: the published ones, and no deadlock in any other."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as library

from lightning_cnnpar.pipeline.schedules import Action, Actions, StepSchedule, gpipe, render, step_tables
from lightning_cnnpar.pipeline.simulate import Kept, chain, ideal_bubble, link_bytes, simulate

SCHEDULES: list[StepSchedule] = ["1f1b", "interleaved_1f1b", "zero_bubble"]


def _text(table: Actions) -> str:
    return " ".join(map(str, table))


def test_1f1b() -> None:
    tables = step_tables("1f1b", [0, 1, 2], 3, 4)
    assert list(map(_text, tables)) == [
        "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
        "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3",
        "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3",
    ]


def test_interleaved() -> None:
    tables = step_tables("interleaved_1f1b", [0, 1, 0, 1], 2, 2)
    assert list(map(_text, tables)) == [
        "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1",
    ]


def test_zero_bubble() -> None:
    tables = step_tables("zero_bubble", [0, 1], 2, 3)
    assert list(map(_text, tables)) == [
        "F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2",
        "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2",
    ]


def _of_library(kind: Any, ranks: int, stages_per_rank: int, microbatches: int) -> tuple[Actions, ...]:
    """The library's tables, without building stages or groups."""
    schedule = object.__new__(kind)
    schedule.pp_group_size, schedule.n_local_stages = ranks, stages_per_rank
    schedule._n_microbatches, schedule._num_stages = microbatches, ranks * stages_per_rank
    schedule.number_of_rounds = max(1, microbatches // ranks)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    tables = [schedule._calculate_single_rank_operations(rank) for rank in range(ranks)]
    return tuple(
        tuple(Action(a.computation_type.value, a.stage_index, a.microbatch_index) for a in table if a is not None)
        for table in tables
    )


@pytest.mark.parametrize("ranks", range(1, 9))
def test_tables_are_those_of_torch(ranks: int) -> None:
    for stages_per_rank in range(1, 5):
        for microbatches in range(1, 33):
            if microbatches % max(1, microbatches // ranks):
                continue
            placement = list(range(ranks)) * stages_per_rank
            pairs: list[tuple[StepSchedule, Any]] = [("zero_bubble", library.ScheduleInterleavedZeroBubble)]
            if stages_per_rank > 1:
                pairs.append(("interleaved_1f1b", library.ScheduleInterleaved1F1B))
            for name, kind in pairs:
                expected = _of_library(kind, ranks, stages_per_rank, microbatches)
                assert step_tables(name, placement, ranks, microbatches) == expected


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("microbatches", [8, 9, 16, 32])
def test_1f1b_is_that_of_torch(ranks: int, microbatches: int) -> None:
    """Its order of kinds, that is: its table for inspection counts the last rank's microbatches from 1."""
    schedule = object.__new__(library.Schedule1F1B)
    schedule._n_microbatches, schedule._num_stages = microbatches, ranks
    order = schedule._get_pipeline_order()
    assert order is not None
    tables = step_tables("1f1b", list(range(ranks)), ranks, microbatches)
    for rank, table in enumerate(tables):
        kinds = [action.computation_type.value for action in order[rank] if action is not None]
        assert [action.kind for action in table] == [kind for kind in kinds if kind in ("F", "B")]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_no_deadlock(schedule: StepSchedule, ranks: int) -> None:
    for stages_per_rank in (1,) if schedule == "1f1b" else range(1, 5):
        for microbatches in (1, 2, 3, 5, 8, 13, 32):
            placement = list(range(ranks)) * stages_per_rank
            tables = step_tables(schedule, placement, ranks, microbatches)
            # The loss needs the last stage; the first one has a skip to every other.
            sources = {s: sorted({0, s - 1} - {s, -1}) for s in range(len(placement))}
            result = simulate(tables, sources, outputs=[len(placement) - 1])
            kinds = 3 if schedule == "zero_bubble" else 2
            assert sum(map(len, result.spans)) == kinds * len(placement) * microbatches


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_placement_has_a_table(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    placement = data.draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=7))
    microbatches = data.draw(st.integers(1, 6))
    schedule = data.draw(st.sampled_from(SCHEDULES))
    sources = {s: data.draw(st.lists(st.integers(0, s - 1), unique=True)) if s else [] for s in range(len(placement))}
    outputs = data.draw(st.lists(st.integers(0, len(placement) - 1), min_size=1, unique=True))
    tables = step_tables(schedule, placement, ranks, microbatches)
    result = simulate(tables, sources, outputs=outputs)
    for stage, rank in enumerate(placement):
        forwards = [a.microbatch for a in tables[rank] if a.kind == "F" and a.stage == stage]
        # In order, so that random numbers of a stage don't depend on the schedule.
        assert forwards == list(range(microbatches))
    assert all(kept <= len(placement) * len(placement) for kept in result.in_flight)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 32), (4, 2)])
def test_1f1b_keeps_few_microbatches_at_the_bubble_of_gpipe(ranks: int, microbatches: int) -> None:
    result = simulate(step_tables("1f1b", list(range(ranks)), ranks, microbatches), chain(ranks))
    assert list(result.in_flight) == [min(microbatches, ranks - rank) for rank in range(ranks)]
    assert result.bubble == pytest.approx(ideal_bubble(ranks, microbatches))


@pytest.mark.parametrize("stages_per_rank", [2, 4])
def test_interleaving_divides_the_bubble(stages_per_rank: int) -> None:
    ranks, microbatches = 4, 16
    tables = step_tables("interleaved_1f1b", list(range(ranks)) * stages_per_rank, ranks, microbatches)
    result = simulate(tables, chain(ranks * stages_per_rank))
    idle = (ranks - 1) / stages_per_rank
    assert result.bubble == pytest.approx(idle / (microbatches + idle))


def test_zero_bubble_idles_least_with_the_memory_of_1f1b() -> None:
    ranks, microbatches = 4, 8
    tables = step_tables("zero_bubble", list(range(ranks)), ranks, microbatches)
    result = simulate(tables, chain(ranks))
    # Qi et al., 2023: (P - 1) (F + B - W) in place of (P - 1) (F + B + W), for F = I = W = 1.
    assert result.makespan == 3 * microbatches + (ranks - 1)
    assert max(result.in_flight) == ranks


def test_memory_and_bytes_are_counted() -> None:
    tables = step_tables("1f1b", [0, 1], 2, 4)
    kept = {0: Kept(forward=10, computing=3), 1: Kept(forward=7)}
    assert list(simulate(tables, chain(2), kept=kept).peak_bytes) == [23, 7]
    split = step_tables("zero_bubble", [0, 1], 2, 4)
    halves = {0: Kept(forward=10, weights=4), 1: Kept(forward=7, weights=2)}
    assert list(simulate(split, chain(2), kept=halves).peak_bytes) == [20, 9]
    assert link_bytes([0, 1, 0], {(0, 1): 5, (1, 2): 3, (0, 2): 9}, 2) == {(0, 1): 16, (1, 0): 16}
    assert link_bytes([0, 1], {(0, 1): 5}, 2, training=False) == {(0, 1): 10}


def test_transfers_take_time() -> None:
    tables = step_tables("1f1b", [0, 1], 2, 1)
    assert simulate(tables, chain(2), delay=lambda source, target: 0.5).makespan == 7


def test_the_picture() -> None:
    tables = step_tables("1f1b", [0, 1], 2, 2)
    spans = simulate(tables, chain(2)).spans
    picture = render(tables, lambda rank, action: spans[rank][action][0], width=5)
    assert picture.splitlines() == [
        "rank 0   F0.0 F0.1           B0.0           B0.1",
        "rank 1        F1.0 B1.0      F1.1 B1.1",
    ]


@pytest.mark.parametrize(
    ("schedule", "placement", "ranks", "microbatches"),
    [("1f1b", [0, 1, 2], 3, 4), ("interleaved_1f1b", [0, 1, 0, 1], 2, 2), ("zero_bubble", [0, 1, 2], 3, 4)],
)
def test_the_pictures_of_the_page_are_the_tables(
    schedule: StepSchedule, placement: list[int], ranks: int, microbatches: int
) -> None:
    tables = step_tables(schedule, placement, ranks, microbatches)
    spans = simulate(tables, chain(len(placement))).spans
    picture = render(tables, lambda rank, action: spans[rank][action][0], width=5)
    assert f"```text\n{picture}\n```" in (Path(__file__).parents[3] / "docs" / "schedules.md").read_text()


def test_the_picture_of_gpipe() -> None:
    halves = [gpipe([0, 1], rank, 4) for rank in (0, 1)]
    tables = [(*half.forward, *half.backward) for half in halves]
    spans = simulate(tables, chain(2)).spans
    picture = render(tables, lambda rank, action: spans[rank][action][0], width=5)
    assert f"```text\n{picture}\n```" in (Path(__file__).parents[3] / "docs" / "schedules.md").read_text()
