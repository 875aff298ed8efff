"""Runs Lightning's own trainer tests with `HybridStrategy` in place of the implicit single device.

    python -m scripts.lightning_suite CHECKOUT [--write] [PYTEST_ARGUMENT ...]

CHECKOUT is a checkout of Lightning's repository at (or near) the installed release. The tests run twice, with the plain
Trainer and with the strategy at world size 1, against the installed Lightning; what a plain Trainer passes, the
strategy has to pass. Nothing is copied. Beside this project's extras the tests need `psutil`, `cloudpickle` and
`pytest-rerunfailures`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "lightning_suite.md"
FILES = (
    "trainer/optimization",
    "trainer/logging_",
    "models/test_hooks.py",
    "models/test_restore.py",
    "callbacks/test_early_stopping.py",
    "callbacks/test_weight_averaging.py",
    "callbacks/test_stochastic_weight_avg.py",
    "core/test_lightning_optimizer.py",
    "loops/test_evaluation_loop.py",
    "loops/test_prediction_loop.py",
)
TESTS = "tests/tests_pytorch"
TESTS_FAILED = 1
RETRIES = 3
REASONS = {
    "test_all_rank_logging_ddp_cpu": (
        "The test asks for `ddp_spawn`, so this strategy has no part in it. A process of it aborts at its end now and\n"
        "  then (`terminate called without an active exception`), also with a plain Trainer: 1 of 10 runs."
    ),
}
Outcomes = dict[str, dict[str, str]]


def run(checkout: Path, names: Sequence[str], arguments: Sequence[str], *, substitute: bool) -> Outcomes:
    """Outcomes by test, of files or tests."""
    tests = checkout / TESTS
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder, "outcomes.json")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "scripts.substitute_strategy",
            "--outcomes",
            str(outcomes),
        ]
        command += ["-p", "no:cacheprovider", "--timeout", "120", *(["--substitute-strategy"] if substitute else [])]
        paths = os.pathsep.join((str(ROOT), str(checkout / "tests")))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        status = subprocess.run([*command, *names, *arguments], cwd=tests, env=environment, check=False).returncode
        if status not in (0, TESTS_FAILED):
            raise SystemExit(f"The tests of {checkout} didn't run to the end (pytest's exit status: {status}).")
        found: Outcomes = json.loads(outcomes.read_text())
    return found


def page(passed: Sequence[str], lost: Sequence[str], unsteady: Sequence[str]) -> str:
    """The result as a page of the documentation."""
    lines = [
        "# Lightning's own tests",
        "",
        f"With Lightning {version('lightning')} and torch {version('torch')}, a plain Trainer passes {len(passed)}",
        "of the trainer tests that `scripts/lightning_suite.py` names. With `HybridStrategy` in place of the single",
        f"device, {len(passed) - len(lost)} of these pass.",
        *_listed("Those that don't:", lost),
        *_listed(f"Passed when they were run again, {RETRIES} times at most:", unsteady),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _listed(title: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    # Names of tests are longer than a line.
    reasons = {name: REASONS.get(name.split("::")[-1], "") for name in names}
    return ["", title, "", *(f"- `{name}`" + (f"\n  {reason}" if reason else "") for name, reason in reasons.items())]


def main() -> None:
    """Run both, print, and write the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--write", action="store_true")
    known, arguments = parser.parse_known_args()
    checkout = known.checkout.resolve()
    plain = run(checkout, FILES, arguments, substitute=False)
    ours = run(checkout, FILES, arguments, substitute=True)
    passed, first_lost = compare(plain, ours)
    lost = first_lost
    for _ in range(RETRIES):
        if lost:
            ours |= run(checkout, [name.removeprefix(f"{TESTS}/") for name in lost], arguments, substitute=True)
            passed, lost = compare(plain, ours)
    text = page(passed, lost, [name for name in first_lost if name not in lost])
    print(text)
    if known.write:
        PAGE.write_text(text)


def compare(plain: Outcomes, ours: Outcomes) -> tuple[list[str], list[str]]:
    """What a plain Trainer passes, and what of that the strategy doesn't."""
    passed = [name for name, outcome in plain.items() if outcome["outcome"] == "passed"]
    return passed, [name for name in passed if ours.get(name, {}).get("outcome") != "passed"]


if __name__ == "__main__":
    main()
