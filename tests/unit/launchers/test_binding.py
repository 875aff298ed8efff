"""How a machine is divided among its ranks."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cnnpar.config import NumaBinding
from lightning_cnnpar.launchers.binding import RankBinding, RankDevice, plan_binding, split_evenly
from lightning_cnnpar.launchers.cpulist import format_list
from lightning_cnnpar.launchers.topology import Node, PciDevice, Topology, read_topology
from tests.unit.launchers.machines import Machine, two_nodes

CORES = NumaBinding(mode="cores")


def plan(
    machine: Machine, folder: Path, devices: list[str | None], mask: str = "", **options: Any
) -> list[RankBinding]:
    """Bindings of ranks on devices at these addresses; `None` is a rank on the CPU."""
    topology = read_topology(machine.write(folder))
    names = [RankDevice() if a is None else RankDevice(name=f"cuda:{i}", address=a) for i, a in enumerate(devices)]
    cpus = topology.online if not mask else frozenset(int(cpu) for cpu in mask.split(","))
    options = {"quota": None, "options": NumaBinding(), **options}
    return plan_binding(topology, len(devices), names, cpus, **options)


def shape(bindings: list[RankBinding]) -> list[tuple[Any, ...]]:
    return [(binding.node, format_list(binding.cpus), binding.threads, binding.memory) for binding in bindings]


GPUS = [f"0000:{16 + gpu:02x}:00.0" for gpu in range(4)]


def test_ranks_run_on_the_node_of_their_device(tmp_path: Path) -> None:
    found = plan(two_nodes(gpus=4), tmp_path, [GPUS[1], GPUS[0], GPUS[2]])
    assert shape(found) == [
        (1, "4-7,12-15", 4, "preferred"),
        (0, "0-3,8-11", 2, "preferred"),
        (0, "0-3,8-11", 2, "preferred"),
    ]
    assert [binding.network for binding in found] == ["0000:e1:00.0", "0000:e0:00.0", "0000:e0:00.0"]
    assert found[0].reason == "cuda:0 hangs on node 1"
    assert not any(binding.warnings for binding in found)


def test_cores_of_a_node_are_divided_with_their_siblings(tmp_path: Path) -> None:
    found = plan(two_nodes(gpus=4), tmp_path, [GPUS[0], GPUS[2], GPUS[1]], options=CORES)
    assert [format_list(binding.cpus) for binding in found] == ["0-1,8-9", "2-3,10-11", "4-7,12-15"]


def test_ranks_without_devices_take_nodes_in_turn(tmp_path: Path) -> None:
    assert shape(plan(two_nodes(), tmp_path, 4 * [None])) == [
        (0, "0-3,8-11", 2, "preferred"),
        (0, "0-3,8-11", 2, "preferred"),
        (1, "4-7,12-15", 2, "preferred"),
        (1, "4-7,12-15", 2, "preferred"),
    ]


def test_a_share_on_two_nodes_is_bound_to_neither_memory(tmp_path: Path) -> None:
    found = plan(two_nodes(smt=1), tmp_path, 3 * [None])
    assert shape(found)[1] == (None, "0-7", 3, "off")


def test_one_node_is_not_narrowed(tmp_path: Path) -> None:
    found = plan(Machine(nodes={0: "0-7"}), tmp_path, 4 * [None])
    assert shape(found) == 4 * [(0, "0-7", 2, "off")]


@pytest.mark.parametrize("device", [None, GPUS[0]])
def test_too_few_cores_are_shared_with_a_warning(device: str | None, tmp_path: Path) -> None:
    machine = Machine(nodes={0: "0-1"}, devices={GPUS[0]: ("0x030200", "0x10de", "0")})
    found = plan(machine, tmp_path, 4 * [device], options=CORES)
    assert [format_list(binding.cpus) for binding in found] == ["0", "0", "1", "1"]
    assert [binding.threads for binding in found] == [1, 1, 1, 1]
    assert found[0].warnings[0].startswith("4 ranks share 2 cores (CPUs 0-1): they take turns. Start fewer ranks")


def test_the_mask_at_the_start_is_never_left(tmp_path: Path) -> None:
    found = plan(two_nodes(smt=1), tmp_path, [GPUS[0], GPUS[1]], mask="2,3,4")
    assert shape(found) == [(0, "2-3", 2, "preferred"), (1, "4", 1, "preferred")]


@pytest.mark.parametrize(
    ("machine", "mask", "message"),
    [
        (
            Machine(nodes={0: "0-3", 1: "4-7"}, devices={GPUS[0]: ("0x030200", "0x10de", "-1")}),
            "",
            r"cuda:0 \(0000:10:00.0\) reports no NUMA node: its rank is not bound to a node. To bind it, check",
        ),
        (
            Machine(nodes={0: "0-3", 1: "4-7", 2: ""}, devices={GPUS[0]: ("0x030200", "0x10de", "2")}),
            "",
            r"cuda:0 hangs on node 2, which has no online CPU: its rank is not bound",
        ),
        (
            Machine(nodes={0: "0-3", 1: "4-7"}, devices={GPUS[0]: ("0x030200", "0x10de", "1")}),
            "0,1",
            r"cuda:0 hangs on node 1, which has none of the CPUs 0-1 that the job has",
        ),
    ],
)
def test_a_device_on_no_usable_node_leaves_its_rank_unbound(
    machine: Machine, mask: str, message: str, tmp_path: Path
) -> None:
    (found,) = plan(machine, tmp_path, [GPUS[0]], mask=mask, options=CORES)
    assert (found.node, found.memory) == (None, "off")
    assert format_list(found.cpus) == ("0-1" if mask else "0-7")
    with pytest.raises(ValueError, match=message):
        raise ValueError(*found.warnings)


def test_an_unbound_rank_computes_with_its_part_of_the_threads(tmp_path: Path) -> None:
    machine = Machine(nodes={0: "0-3", 1: "4-7"}, devices=dict.fromkeys(GPUS, ("0x030200", "0x10de", "-1")))
    assert [binding.threads for binding in plan(machine, tmp_path, list(GPUS))] == [2, 2, 2, 2]


def test_the_only_node_is_that_of_every_device(tmp_path: Path) -> None:
    machine = Machine(nodes={0: "0-3"}, devices={GPUS[0]: ("0x030200", "0x10de", "-1")})
    (found,) = plan(machine, tmp_path, [GPUS[0]])
    assert (found.node, found.warnings) == (0, ())


def test_the_driver_knows_where_the_bus_does_not(tmp_path: Path) -> None:
    machine = Machine(nodes={0: "0-3", 1: "4-7"}, devices={GPUS[0]: ("0x030200", "0x10de", "-1")})
    topology = read_topology(machine.write(tmp_path))
    device = RankDevice(name="cuda:0", address=GPUS[0], node=1)
    assert plan_binding(topology, 1, [device], topology.online, None, NumaBinding())[0].node == 1


def test_nodes_that_claim_the_same_cpus_bind_nothing(tmp_path: Path) -> None:
    machine = Machine(nodes={0: "0-7", 1: "0-7"}, devices={GPUS[0]: ("0x030200", "0x10de", "1")})
    assert shape(plan(machine, tmp_path, [GPUS[0], GPUS[0]])) == 2 * [(None, "0-7", 4, "off")]


def test_a_node_without_memory_has_no_memory_policy(tmp_path: Path) -> None:
    machine = Machine(nodes={0: "0-3", 1: "4-7"}, memory={0: 0}, devices={GPUS[0]: ("0x030200", "0x10de", "0")})
    (found,) = plan(machine, tmp_path, [GPUS[0]])
    assert (found.node, found.memory) == (0, "off")


@pytest.mark.parametrize(("quota", "threads"), [(None, 4), (100.0, 4), (6.0, 3), (1.5, 1)])
def test_a_quota_is_divided_among_the_ranks(quota: float | None, threads: int, tmp_path: Path) -> None:
    found = plan(two_nodes(), tmp_path, [GPUS[0], GPUS[1]], quota=quota)
    assert [binding.threads for binding in found] == [threads, threads]
    assert ("CPU quota" in found[0].reason) == (threads < 4)


def test_cpus_that_a_launcher_gave_to_the_rank_are_kept(tmp_path: Path) -> None:
    (found,) = plan(two_nodes(), tmp_path, [GPUS[0]], mask="4,5,12,13", options=CORES, narrowed=True)
    assert shape([found]) == [(1, "4-5,12-13", 2, "preferred")]
    assert found.warnings[0].startswith("cuda:0 hangs on node 0, but its rank was started on CPUs 4-5,12-13 elsewhere")


@given(st.integers(1, 40), st.integers(1, 12))
def test_shares_are_contiguous_complete_and_even(cores: int, parts: int) -> None:
    everything = [frozenset({core}) for core in range(cores)]
    shares = [split_evenly(everything, parts, part) for part in range(parts)]
    assert set().union(*shares) == set(everything) or cores < parts
    assert max(map(len, shares)) - min(map(len, shares)) <= (1 if cores >= parts else 0)
    if cores >= parts:
        assert [core for share in shares for core in share] == everything


@st.composite
def situations(draw: st.DrawFn) -> tuple[Topology, list[RankDevice], frozenset[int]]:
    """A machine of sparse nodes with SMT, devices on some of them or on none, and a mask."""
    ids = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
    smt = draw(st.sampled_from([1, 2, 4]))
    nodes, cores, first = [], [], 0
    for node in sorted(ids):
        count = draw(st.integers(0, 4))
        mine = [frozenset(range(first + core * smt, first + (core + 1) * smt)) for core in range(count)]
        first += count * smt
        cores += mine
        nodes.append(Node(id=node, cpus=frozenset().union(*mine), memory=draw(st.booleans())))
    if not cores:
        cores = [frozenset(range(smt))]
        nodes[0] = Node(id=nodes[0].id, cpus=cores[0], memory=True)
    online = frozenset().union(*cores)
    ranks = draw(st.integers(1, 6))
    places = draw(st.lists(st.sampled_from([*ids, None]), min_size=ranks, max_size=ranks))
    accelerators = tuple(
        PciDevice(address=str(index), pci_class="0x030200", vendor="", node=node) for index, node in enumerate(places)
    )
    on_cpu = draw(st.booleans())
    devices = [RankDevice() if on_cpu else RankDevice(name=f"cuda:{i}", address=str(i)) for i in range(ranks)]
    mask = draw(st.sets(st.sampled_from(sorted(online)), min_size=1))
    topology = Topology(
        nodes=tuple(nodes), packages={}, cores=tuple(cores), online=online, allowed=online, accelerators=accelerators
    )
    return topology, devices, frozenset(mask)


@given(situations(), st.sampled_from(["node", "cores"]), st.none() | st.floats(0.1, 20))
def test_every_rank_gets_allowed_cpus_and_few_enough_threads(situation: Any, mode: Any, quota: float | None) -> None:
    topology, devices, mask = situation
    bindings = plan_binding(topology, len(devices), devices, mask, quota, NumaBinding(mode=mode))
    usable = [core for core in topology.cores if core & mask]
    # Each core is one thread's, unless ranks outnumber cores somewhere, which is told.
    told = any(binding.warnings for binding in bindings)
    assert sum(binding.threads for binding in bindings) <= len(usable) or told
    for binding in bindings:
        assert binding.cpus
        assert binding.cpus <= mask
        assert 1 <= binding.threads <= len([core for core in usable if core & binding.cpus])
        assert quota is None or binding.threads <= max(1, quota / len(devices))
        if binding.node is not None:
            node = topology.node(binding.node)
            assert node is not None
            assert binding.cpus <= node.cpus or len(topology.nodes) == 1


@given(situations())
def test_with_cores_no_two_ranks_meet_unless_told(situation: Any) -> None:
    topology, devices, mask = situation
    bindings = plan_binding(topology, len(devices), devices, mask, None, CORES)
    bound = [binding for binding in bindings if not binding.warnings]
    for one in bound:
        # Siblings stay together.
        assert all(core & mask <= one.cpus or not core & one.cpus for core in topology.cores)
        for other in bound:
            assert one is other or not one.cpus & other.cpus
