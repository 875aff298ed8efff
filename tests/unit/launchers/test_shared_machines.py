"""Real and odd machines, whose files lie beside the repository, are read as their makers describe them."""

import functools
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from lightning_cnnpar.cli import main
from lightning_cnnpar.launchers.cpulist import format_list
from lightning_cnnpar.launchers.topology import read_topology

FOLDER = Path(__file__).parents[4] / "shared/numa"


@functools.cache
def cases() -> list[dict[str, Any]]:
    file = FOLDER / "cases.json"
    return json.loads(file.read_text()) if file.exists() else []


pytestmark = pytest.mark.skipif(not cases(), reason=f"{FOLDER} has no cases.json")


@pytest.fixture(params=range(len(cases())), ids=[case["name"] for case in cases()])
def case_and_root(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, Any], Path]:
    case = cases()[request.param]
    with tarfile.open(FOLDER / case["fsroot_tar"]) as archive:
        wanted = [member for member in archive if _is_read(member.name)]
        archive.extractall(tmp_path, wanted, filter="fully_trusted")
    return case, tmp_path / case["fsroot_dir"]


def _is_read(name: str) -> bool:
    parts = ("/devices/system/", "/bus/pci", "/devices/pci", "/proc/", "/cgroup/", "/cpuset/")
    return any(part in f"/{name}/" for part in parts)


def test_the_machine_is_read_right(
    case_and_root: tuple[dict[str, Any], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    case, root = case_and_root
    topology = read_topology(root)
    assert {str(node.id): format_list(node.cpus) for node in topology.nodes} == case["nodes"]
    assert [node.id for node in topology.nodes if not node.cpus] == case["memory_only"]
    assert {str(package): format_list(cpus) for package, cpus in topology.packages.items()} == case["packages"]
    assert max(map(len, topology.cores)) == case["smt_width"]
    assert format_list(topology.online) == case["online"]
    devices = [{"pci": gpu["bdf"], "node": gpu["numa_node"]} for gpu in case["pci_gpus"]]

    assert main(["topology", "--sysfs", str(root), "--ranks", "3", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == ["nodes", "packages", "devices", "ranks"]
    assert {str(node["id"]): node["cpus"] for node in printed["nodes"]} == case["nodes"]
    assert printed["devices"] == devices
    assert len(printed["ranks"]) == 3
    assert all(rank["cpus"] and rank["threads"] >= 1 for rank in printed["ranks"])

    assert main(["topology", "--sysfs", str(root)]) == 0
    assert capsys.readouterr().out.count("\nnode ") + 1 == len(case["nodes"])
