"""On a machine with two nodes, bound ranks run on, and allocate from, the node of their device."""

import json
from typing import Any

import pytest

from tests.numa_vm import machine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(machine.missing() is not None, reason=str(machine.missing())),
]
PAGES = (48 << 20) // 4096


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    said = machine.run(machine.build(tmp_path_factory.mktemp("guest")), timeout=300)
    assert "guest: done" in said, said
    lines = [line.partition("guest: ")[2] for line in said.splitlines() if "guest: {" in line]
    return [json.loads(line) for line in lines]


def test_ranks_run_on_the_node_of_their_device(seen: list[dict[str, Any]]) -> None:
    # Two modes, three memory policies, two ranks, the device of node 1 first.
    assert [one["node"] for one in seen] == 6 * [1, 0]
    for one in seen:
        assert one["refused"] == []
        assert one["allowed"] == [2 * one["node"], 2 * one["node"] + 1]
        assert set(one["ran"]) <= set(one["allowed"])


@pytest.mark.parametrize("memory", ["preferred", "bind"])
def test_memory_comes_from_that_node(memory: str, seen: list[dict[str, Any]]) -> None:
    chosen = [one for one in seen if one["memory"] == memory]
    assert len(chosen) == 4
    for one in chosen:
        assert one["pages"] == {str(one["node"]): PAGES}
