"""What users do, trained on several ranks and held against one process.

STORIES = Stories({"C04": Story(case, Layout(3, 1))})
STORIES.hold("C04")        trains it, and every other story of that layout in the same start, and compares
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tests.fitting import (
    TOLERANCE,
    Case,
    Layout,
    Record,
    assert_same,
    assert_same_tree,
    fit_alone,
    fit_on_ranks,
    fit_several_on_ranks,
)
from tests.ranks import RankError


@dataclasses.dataclass(frozen=True)
class Story:
    """A case on a layout.

    Attributes:
        case: What the ranks train.
        layout: How many they are.
        oracle: What one process trains, where that has to be written in another way.
        tolerance: How far a value may be off.
    """

    case: Case
    layout: Layout = dataclasses.field(default_factory=lambda: Layout(2, 1))
    oracle: Case | None = None
    tolerance: float = TOLERANCE


def _optimizers(record: Record) -> list[Any]:
    """States of optimizers and schedulers; entries by index, as no rank knows in which order one process met them."""
    states = [{**s, "state": dict(sorted(s["state"].items()))} for s in record.checkpoint["optimizer_states"]]
    return [states, record.checkpoint["lr_schedulers"]]


class Stories:
    """Trains the stories of a file, all of one layout in one start of the ranks."""

    def __init__(self, stories: Mapping[str, Story]) -> None:
        self._stories = dict(stories)
        self._records: dict[str, Record] = {}
        self._oracles: dict[str, Record] = {}

    @property
    def names(self) -> list[str]:
        """All stories, in order."""
        return list(self._stories)

    def record(self, name: str) -> Record:
        """What the ranks left behind."""
        if name not in self._records:
            layout = self._stories[name].layout
            group = [other for other, story in self._stories.items() if story.layout == layout]
            try:
                found = fit_several_on_ranks([self._stories[other].case for other in group], layout)
                self._records.update(zip(group, found, strict=True))
            except (RankError, AssertionError):
                # One story fails them all: tell which.
                self._records[name] = fit_on_ranks(self._stories[name].case, layout)
        return self._records[name]

    def oracle(self, name: str) -> Record:
        """What one process left behind."""
        if name not in self._oracles:
            story = self._stories[name]
            self._oracles[name] = fit_alone(story.oracle or story.case)
        return self._oracles[name]

    def hold(self, name: str) -> tuple[Record, Record]:
        """Compare every gradient, parameter, buffer, logged value and optimizer state; returns both records."""
        record, oracle = self.record(name), self.oracle(name)
        assert record.gradients
        tolerance = self._stories[name].tolerance
        assert_same(record, oracle, tolerance)
        assert_same_tree(_optimizers(record), _optimizers(oracle), "optimizers", tolerance)
        return record, oracle
