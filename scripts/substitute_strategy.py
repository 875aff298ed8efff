"""A pytest plugin that records outcomes and puts `HybridStrategy` where Lightning would pick one CPU device.

python -m pytest -p scripts.substitute_strategy --outcomes FILE [--substitute-strategy] ...
"""

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy

# The Trainer's part that picks the strategy; its name is private (Lightning 2.6).
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_cnnpar import HybridStrategy

_OUTCOMES = pytest.StashKey[dict[str, dict[str, str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add this plugin's options."""
    group = parser.getgroup("lightning_cnnpar")
    group.addoption("--outcomes", type=Path, required=True, help="file for the outcome of each test, as JSON")
    group.addoption("--substitute-strategy", action="store_true", help="train with HybridStrategy")


def pytest_configure(config: pytest.Config) -> None:
    """Substitute the strategy for the time of this process."""
    config.stash[_OUTCOMES] = {}
    config.pluginmanager.register(_Recorder(config.stash[_OUTCOMES]))
    if config.getoption("--substitute-strategy"):
        _substitute()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Write the outcomes."""
    config.getoption("--outcomes").write_text(json.dumps(config.stash[_OUTCOMES], indent=1))


class _Recorder:
    """Keeps the outcome of each test: that of its call, unless preparing or cleaning up failed."""

    def __init__(self, outcomes: dict[str, dict[str, str]]) -> None:
        self._outcomes = outcomes

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what pytest says of a phase of a test."""
        if report.when != "call" and report.passed:
            return
        outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else str(report.outcome)
        message = report.longreprtext.strip().splitlines() if report.failed else []
        self._outcomes[report.nodeid] = {"outcome": outcome, "message": message[-1] if message else ""}


def _substitute() -> None:
    choose = _AcceleratorConnector._choose_strategy

    def choose_hybrid(connector: Any) -> Any:
        chosen = choose(connector)
        is_one_cpu = type(chosen) is SingleDeviceStrategy and chosen.root_device.type == "cpu"
        return HybridStrategy() if is_one_cpu else chosen

    _AcceleratorConnector._choose_strategy = choose_hybrid  # type: ignore[method-assign]
