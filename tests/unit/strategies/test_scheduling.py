import dataclasses

import pytest

from lightning_cnnpar.strategies.scheduling import Situation, choose_checkpointing, choose_schedule

GIB = 2**30
LARGE = Situation(
    pipeline_size=4,
    num_microbatches=8,
    steps_itself=False,
    parameter_bytes=4 * GIB,
    activation_bytes=16 * GIB,
    available_bytes=4 * GIB,
)


@pytest.mark.parametrize(
    ("change", "schedule", "why"),
    [
        ({}, "zero_bubble", "gpipe 5.00, 1f1b 3.00, of 4.00"),
        ({"available_bytes": 6 * GIB}, "gpipe", "it fits"),
        ({"available_bytes": 2 * GIB}, "1f1b", "Expect it not to fit"),
        ({"pipeline_size": 1}, "gpipe", "nothing to order"),
        ({"num_microbatches": 1}, "gpipe", "nothing to order"),
        ({"steps_itself": True}, "gpipe", "steps its optimizers itself"),
        ({"activation_bytes": 0}, "gpipe", "example_input_array"),
    ],
)
def test_the_choice_and_its_reason(change: dict[str, float], schedule: str, why: str) -> None:
    chosen, reason = choose_schedule(dataclasses.replace(LARGE, **change))  # type: ignore[arg-type]
    assert chosen == schedule
    assert f"takes {schedule!r}" in reason
    assert why in reason


@pytest.mark.parametrize(
    ("schedule", "available", "chosen"),
    [("gpipe", 6, "never"), ("gpipe", 4, "except_last"), ("1f1b", 4, "never"), ("1f1b", 2, "except_last")],
)
def test_activations_are_computed_again_where_they_don_t_fit(schedule: str, available: int, chosen: str) -> None:
    name, why = choose_checkpointing(dataclasses.replace(LARGE, available_bytes=available * GIB), schedule)
    assert name == chosen
    assert f"takes {chosen!r}" in why


def test_unknown_activations_are_kept() -> None:
    name, why = choose_checkpointing(dataclasses.replace(LARGE, activation_bytes=0), "gpipe")
    assert name == "never"
    assert "example_input_array" in why
