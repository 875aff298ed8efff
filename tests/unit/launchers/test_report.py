"""What a user reads about the bindings."""

from pathlib import Path

import pytest

from lightning_cnnpar.cli import main
from lightning_cnnpar.launchers.binding import RankBinding, RankDevice
from lightning_cnnpar.launchers.report import Row, table
from tests.unit.launchers.machines import Machine, two_nodes

BOUND = RankBinding(
    local_rank=0,
    device=RankDevice(name="cuda:0", address="0000:3b:00.0"),
    node=0,
    cpus=frozenset(range(8)),
    threads=4,
    memory="preferred",
    network="0000:5e:00.0",
    reason="cuda:0 hangs on node 0",
)


def test_the_table() -> None:
    unknown = RankBinding(
        local_rank=1,
        device=RankDevice(name="cuda:1"),
        node=None,
        cpus=frozenset({8}),
        threads=1,
        memory="off",
        reason="x",
    )
    assert table([Row(rank=0, host="a", binding=BOUND), Row(rank=1, host="a", binding=unknown)]).splitlines() == [
        "rank  device  PCI address   node  CPUs  threads  memory     nearest NIC   reason",
        "0     cuda:0  0000:3b:00.0  0     0-7   4        preferred  0000:5e:00.0  cuda:0 hangs on node 0",
        "1     cuda:1  -             -     8     1        off        -             x",
    ]


def test_hosts_are_named_if_there_are_several() -> None:
    lines = table([Row(rank=rank, host=host, binding=BOUND) for rank, host in enumerate("ab")]).splitlines()
    assert [line.split()[0] for line in lines] == ["host", "a", "b"]


def test_one_line_where_nothing_was_decided() -> None:
    rows = [Row(rank=rank, host="a", binding=BOUND, decided=False) for rank in range(2)]
    assert table(rows) == "NUMA: 2 ranks on CPUs 0-7, 4 thread(s) each (cuda:0 hangs on node 0)"


def test_the_command_shows_machine_and_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--sysfs", str(two_nodes().write(tmp_path)), "--mode", "cores", "--ranks", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "node 0: CPUs 0-3,8-11, memory",
        "node 1: CPUs 4-7,12-15, memory",
        "package 0: CPUs 0-3,8-11",
        "package 1: CPUs 4-7,12-15",
    ]
    assert "device 0000:10:00.0: node 0, nearest NIC 0000:e0:00.0" in lines
    assert [line.split()[:6] for line in lines[-2:]] == [
        ["0", "device:0", "0000:10:00.0", "0", "0-3,8-11", "4"],
        ["1", "device:1", "0000:11:00.0", "1", "4-7,12-15", "4"],
    ]


def test_the_display_of_a_management_controller_is_nobodys_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(nodes={0: "0-1", 1: "2-3"}, devices={"0000:05:00.0": ("0x030000", "0x1a03", "0")})
    assert main(["topology", "--sysfs", str(machine.write(tmp_path))]) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "NUMA: 1 rank on CPUs 0-3, 4 thread(s) each (the only rank, and no device)"
    )


def test_the_command_reads_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--ranks", "2"]) == 0
    assert "physical cores" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sysfs", "/nonexistent"], "cnnpar: /nonexistent has neither sys"),
        (["--ranks", "0"], "cnnpar: --ranks 0: give"),
    ],
)
def test_the_command_says_what_it_can_not_do(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["topology", *arguments]) == 1
    assert message in capsys.readouterr().err
