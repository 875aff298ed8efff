"""Whether compression pays, by the formula."""

import pytest

from lightning_cnnpar.compression.auto import mildest, predicted, repeats

# Seconds an element, and the share of the bytes.
COSTS = {"bf16": (1e-9, 0.5), "int8": (6e-9, 0.26), "int4": (6e-9, 0.13)}


@pytest.mark.parametrize(
    ("bandwidth", "chosen"), [(1e10, "none"), (2e9, "none"), (1.25e8, "int4"), (3.2e8, "bf16"), (1.25e7, "int4")]
)
def test_a_stronger_way_is_taken_only_where_it_is_worth_it(bandwidth: float, chosen: str) -> None:
    assert mildest(predicted(bandwidth, COSTS, 2)) == chosen


def test_the_forecast_follows_the_formula() -> None:
    seconds = predicted(1e8, COSTS, 4)
    assert seconds["none"] == pytest.approx(1.5 * 4 / 1e8)
    assert seconds["int8"] == pytest.approx(1.5 * 4 * 0.26 / 1e8 + 6e-9)


@pytest.mark.parametrize(("seconds", "times"), [(7.0, 1), (0.7, 4), (0.1, 5), (0.005, 50), (1e-6, 50)])
def test_fast_links_are_measured_more_often(seconds: float, times: int) -> None:
    assert repeats(seconds) == times
