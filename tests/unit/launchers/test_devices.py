"""CUDA's numbers lead to the right place on the bus."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_cnnpar.launchers.binding import RankDevice
from lightning_cnnpar.launchers.devices import Gpu, from_nvml, list_gpus, locate, visible_gpus

A, B, C = (
    Gpu(address=f"0000:{bus}:00.0", uuid=f"GPU-{bus}-x", model="H", node=node, parts=(f"MIG-{bus}-part",))
    for bus, node in (("1a", 0), ("1b", 1), ("1c", None))
)


@pytest.mark.parametrize(
    ("selection", "seen"),
    [
        (None, [A, B, C]),
        ("", []),
        ("2,0", [C, A]),
        (" 1 , 2 ", [B, C]),
        ("GPU-1c,GPU-1a", [C, A]),
        ("MIG-1b-part", [B]),
        ("MIG-GPU-1c-x/3/0", [C]),
        ("1,GPU-1c-x", [B, C]),
        # As CUDA does, what follows an entry that is no device is not seen.
        ("0,9,1", [A]),
        ("0,-1,1", [A]),
        # The start of two UUIDs.
        ("GPU-1", [None]),
    ],
)
def test_which_devices_are_visible(selection: str | None, seen: list[Gpu | None]) -> None:
    environment = {} if selection is None else {"CUDA_VISIBLE_DEVICES": selection}
    assert visible_gpus([A, B, C], environment) == seen


def test_unlike_devices_are_numbered_by_speed_unless_the_bus_decides() -> None:
    other = Gpu(address="0000:1d:00.0", uuid="GPU-1d", model="L")
    assert visible_gpus([A, other], {}) == [None, None]
    assert visible_gpus([A, other], {"CUDA_VISIBLE_DEVICES": "1,GPU-1d"}) == [None, other]
    assert visible_gpus([A, other], {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == [A, other]


def test_ranks_are_located() -> None:
    found = locate(["cuda:1", "cuda:0", "cpu", "cuda:7"], [A, B], {"CUDA_VISIBLE_DEVICES": "1,0"})
    assert found == [
        RankDevice(name="cuda:1", address=A.address, node=0),
        RankDevice(name="cuda:0", address=B.address, node=1),
        RankDevice(name="cpu"),
        RankDevice(name="cuda:7"),
    ]


def test_the_driver_lists_devices_in_files(tmp_path: Path) -> None:
    for bus in ("d8", "3b"):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:{bus}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            f"Model: \t\t NVIDIA X\nIRQ:   \t\t 1\nGPU UUID: \t GPU-{bus}\nBus Type: PCIe\n"
        )
    found = list_gpus(tmp_path)
    assert [(gpu.address, gpu.uuid, gpu.model) for gpu in found] == [
        ("0000:3b:00.0", "GPU-3b", "NVIDIA X"),
        ("0000:d8:00.0", "GPU-d8", "NVIDIA X"),
    ]


class NVMLError(Exception):
    """What NVML raises."""


def nvml(*, affinity: Any, fails: bool = False) -> Any:
    """A driver with two devices, the second of which has one MIG instance in its second place."""

    def init() -> None:
        if fails:
            raise NVMLError

    def part(handle: str, index: int) -> str:
        if (handle, index) != ("3b", 1):
            raise NVMLError
        return "part"

    def memory_affinity(handle: str, size: int, scope: int) -> list[int]:
        if affinity is None:
            raise NVMLError
        return [*affinity, *[0] * (size - len(affinity))]

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_AFFINITY_SCOPE_NODE=0,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: ("d8", "3b")[index],
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=f"00000000:{handle.upper()}:00.0".encode()),
        nvmlDeviceGetUUID=lambda handle: f"MIG-{handle}" if handle == "part" else f"GPU-{handle}",
        nvmlDeviceGetName=lambda handle: b"NVIDIA X",
        nvmlDeviceGetMemoryAffinity=memory_affinity,
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 2,
        nvmlDeviceGetMigDeviceHandleByIndex=part,
    )


@pytest.mark.parametrize(("affinity", "node"), [(None, None), ([0b100], 2), ([0, 1], 64), ([0b11], None)])
def test_nvml_says_where_devices_and_their_nodes_are(affinity: Any, node: int | None) -> None:
    found = from_nvml(nvml(affinity=affinity))
    assert [(gpu.address, gpu.uuid, gpu.model, gpu.node, gpu.parts) for gpu in found] == [
        ("0000:3b:00.0", "GPU-3b", "NVIDIA X", node, ("MIG-part",)),
        ("0000:d8:00.0", "GPU-d8", "NVIDIA X", node, ()),
    ]


def test_without_a_driver_nvml_lists_nothing() -> None:
    assert from_nvml(nvml(affinity=None, fails=True)) == []
