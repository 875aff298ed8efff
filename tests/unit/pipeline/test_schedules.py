import pytest

from lightning_cnnpar.pipeline.schedules import Action, Table, gpipe


def _text(table: Table) -> tuple[str, str]:
    return " ".join(map(str, table.forward)), " ".join(map(str, table.backward))


@pytest.mark.parametrize(
    ("stage_ranks", "rank", "microbatches", "forward", "backward"),
    [
        ([0, 1], 0, 3, "F0.0 F0.1 F0.2", "B0.2 B0.1 B0.0"),
        ([0, 1], 1, 1, "F1.0", "B1.0"),
        ([0, 1, 0, 1], 0, 2, "F0.0 F0.1 F2.0 F2.1", "B2.1 B2.0 B0.1 B0.0"),
        ([0, 0, 1], 0, 2, "F0.0 F1.0 F0.1 F1.1", "B1.1 B0.1 B1.0 B0.0"),
        ([0, 0], 1, 2, "", ""),
    ],
)
def test_gpipe(stage_ranks: list[int], rank: int, microbatches: int, forward: str, backward: str) -> None:
    assert _text(gpipe(stage_ranks, rank, microbatches)) == (forward, backward)


def test_actions_are_plain_values() -> None:
    assert Action("F", 1, 2) == Action("F", 1, 2)
    assert str(Action("B", 1, 2)) == "B1.2"
