"""Odd machines are read right."""

from pathlib import Path

import pytest

from lightning_cnnpar.launchers.cpulist import format_list, parse_list, parse_mask
from lightning_cnnpar.launchers.topology import read_topology
from tests.unit.launchers.machines import Machine, two_nodes


@pytest.mark.parametrize(
    ("text", "members"),
    [("", []), ("\n\0\0", []), ("3", [3]), ("0-2,5\n", [0, 1, 2, 5]), ("0-1,\n\0", [0, 1])],
)
def test_a_list_of_cpus_is_read(text: str, members: list[int]) -> None:
    assert parse_list(text) == frozenset(members)


def test_a_mask_counts_from_its_last_group() -> None:
    assert parse_mask("00000001,80000003\n\0") == {0, 1, 31, 32}


@pytest.mark.parametrize("text", ["0-", "a", "3-x"])
def test_other_text_is_no_list(text: str) -> None:
    with pytest.raises(ValueError):
        parse_list(text)


def test_lists_are_written_as_the_kernel_does() -> None:
    assert format_list([8, 0, 1, 3, 2, 8]) == "0-3,8"
    assert format_list([]) == ""


def test_two_nodes_with_smt(tmp_path: Path) -> None:
    topology = read_topology(two_nodes().write(tmp_path))
    assert [(node.id, format_list(node.cpus), node.memory) for node in topology.nodes] == [
        (0, "0-3,8-11", True),
        (1, "4-7,12-15", True),
    ]
    assert {package: format_list(cpus) for package, cpus in topology.packages.items()} == {
        0: "0-3,8-11",
        1: "4-7,12-15",
    }
    assert topology.cores[:2] == (frozenset({0, 8}), frozenset({1, 9}))
    assert len(topology.cores) == 8
    assert [(device.address, device.node) for device in topology.accelerators] == [
        ("0000:10:00.0", 0),
        ("0000:11:00.0", 1),
    ]
    assert [device.address for device in topology.networks] == ["0000:e0:00.0", "0000:e1:00.0"]


def test_a_copy_of_sys_alone_is_enough(tmp_path: Path) -> None:
    assert read_topology(two_nodes().write(tmp_path) / "sys") == read_topology(tmp_path)


def test_masks_stand_for_lists_on_old_kernels(tmp_path: Path) -> None:
    machine = Machine(nodes={0: "0-7", 4: "64-71"}, siblings=("0-3", "4-7", "64-67", "68-71"), masks_only=True)
    topology = read_topology(machine.write(tmp_path))
    assert [(node.id, format_list(node.cpus)) for node in topology.nodes] == [(0, "0-7"), (4, "64-71")]
    assert [format_list(core) for core in topology.cores] == ["0-3", "4-7", "64-67", "68-71"]


def test_offline_cpus_are_in_no_node_core_or_package(tmp_path: Path) -> None:
    machine = Machine(
        nodes={0: "0-3", 1: "4-7"}, packages={0: "0-7"}, siblings=("0,1", "2,3", "4,5", "6,7"), offline="1,6-7"
    )
    topology = read_topology(machine.write(tmp_path))
    assert format_list(topology.online) == "0,2-5"
    assert [format_list(node.cpus) for node in topology.nodes] == ["0,2-3", "4-5"]
    assert [format_list(core) for core in topology.cores] == ["0", "2-3", "4-5"]
    assert format_list(topology.packages[0]) == "0,2-5"


def test_the_list_of_online_cpus_beats_a_stale_list_of_a_node(tmp_path: Path) -> None:
    machine = Machine(nodes={0: "0-3", 1: "4-7"}, files={"sys/devices/system/cpu/online": "0-5\0"})
    assert [format_list(node.cpus) for node in read_topology(machine.write(tmp_path)).nodes] == ["0-3", "4-5"]


def test_nodes_without_cpus_or_without_memory(tmp_path: Path) -> None:
    machine = Machine(nodes={0: "0-3", 2: "", 9: "4-5"}, memory={9: 0})
    found = [(node.id, bool(node.cpus), node.memory) for node in read_topology(machine.write(tmp_path)).nodes]
    assert found == [(0, True, True), (2, False, True), (9, True, False)]


def test_a_kernel_without_nodes_is_one_node(tmp_path: Path) -> None:
    for cpu in range(2):
        (tmp_path / f"sys/devices/system/cpu/cpu{cpu}").mkdir(parents=True)
    topology = read_topology(tmp_path)
    assert [(node.id, format_list(node.cpus)) for node in topology.nodes] == [(0, "0-1")]
    assert topology.cores == (frozenset({0}), frozenset({1}))


@pytest.mark.parametrize("node", ["-1", "7", "", "none"])
def test_a_device_on_no_node_of_the_machine_is_on_none(node: str, tmp_path: Path) -> None:
    machine = Machine(nodes={0: "0-1", 1: "2-3"}, devices={"0000:10:00.0": ("0x030200", "0x10de", node)})
    assert read_topology(machine.write(tmp_path)).accelerators[0].node is None


@pytest.mark.parametrize(
    ("pci_class", "accelerates"),
    [
        ("0x030000", True),
        ("0x030200", True),
        ("0x0b4000", True),
        ("0x120000", True),
        ("0x0b2000", False),
        ("0x010802", False),
    ],
)
def test_which_classes_accelerate(pci_class: str, accelerates: bool, tmp_path: Path) -> None:
    machine = Machine(nodes={0: "0"}, devices={"0000:10:00.0": (pci_class, "0x10de", "0")})
    assert bool(read_topology(machine.write(tmp_path)).accelerators) == accelerates


def test_the_nearest_network_shares_the_most_bridges(tmp_path: Path) -> None:
    root = Machine(nodes={0: "0-1", 1: "2-3"}).write(tmp_path)
    places = {
        "0000:03:00.0": ("pci0000:00/0000:00:01.0/0000:02:00.0", "0x030200", "0"),
        "0000:04:00.0": ("pci0000:00/0000:00:01.0/0000:02:01.0", "0x020700", "0"),
        "0000:05:00.0": ("pci0000:00/0000:00:01.0/0000:02:00.0", "0x020700", "0"),
        "0000:85:00.0": ("pci0000:80/0000:80:01.0", "0x020000", "1"),
    }
    for address, (above, pci_class, node) in places.items():
        folder = root / "sys/devices" / above / address
        folder.mkdir(parents=True)
        for name, text in {"class": pci_class, "vendor": "0x15b3", "numa_node": node}.items():
            (folder / name).write_text(text)
        link = root / "sys/bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
    topology = read_topology(root)

    def nearest(address: str | None, node: int | None) -> str | None:
        network = topology.nearest_network(address, node)
        return None if network is None else network.address

    assert nearest("0000:03:00.0", 0) == "0000:05:00.0"
    assert nearest(None, 1) == "0000:85:00.0"
    assert nearest(None, None) is None


def test_a_folder_without_processors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has neither sys/devices/system/cpu nor devices/system/cpu"):
        read_topology(tmp_path)
