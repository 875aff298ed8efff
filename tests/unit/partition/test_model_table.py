"""The number of torchvision networks that are cut right can only rise."""

import re

import pytest

from scripts.model_table import PAGE, STAGES, all_models, check

CUT_RIGHT = 86


def test_the_page_says_no_less_than_before() -> None:
    found = re.search(r"^(\d+) of (\d+) networks", PAGE.read_text(), re.MULTILINE)
    assert found is not None
    assert int(found[1]) >= CUT_RIGHT
    assert int(found[2]) >= CUT_RIGHT


@pytest.mark.parametrize("name", ["resnet18", "lraspp_mobilenet_v3_large"])
@pytest.mark.parametrize("stages", STAGES)
def test_rows_of_the_page(name: str, stages: int) -> None:
    assert check(name, stages).problem == ""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_network() -> None:
    wrong = [result for name in all_models() for result in (check(name, stages) for stages in STAGES) if result.problem]
    right = set(all_models()) - {result.model for result in wrong}
    assert len(right) >= CUT_RIGHT, wrong
