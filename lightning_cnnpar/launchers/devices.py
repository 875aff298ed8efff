"""Where on the PCI bus a CUDA device is, found out without touching the device.

    cuda:1 ──► CUDA_VISIBLE_DEVICES="GPU-8a..,3" ──► 3 ──► NVML, else /proc/driver/nvidia ──► 0000:d8:00.0

Asking CUDA itself would open a context on a device that may be another rank's.
"""

import dataclasses
import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_cnnpar.launchers.binding import RankDevice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A device as its driver lists it.

    Attributes:
        address: PCI address.
        uuid: Identity: `GPU-...`.
        model: Name of the product.
        node: NUMA node nearest to its memory, if the driver says so.
        parts: UUIDs of its MIG instances.
    """

    address: str
    uuid: str
    model: str = ""
    node: int | None = None
    parts: tuple[str, ...] = ()


def locate(names: Sequence[str], gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[RankDevice]:
    """The devices called `cuda:0`, `cpu`, ... with their addresses, as far as those can be known.

    Args:
        names: Names as torch gives them, by local rank.
        gpus: What the driver lists, in the order of the bus.
        environment: Says which devices are visible, and in which order.
    """
    visible = visible_gpus(gpus, environment)
    located = []
    for name in names:
        kind, _, index = name.partition(":")
        number = int(index or 0)
        gpu = visible[number] if kind == "cuda" and number < len(visible) else None
        if gpu is None:
            located.append(RankDevice(name=name))
        else:
            located.append(RankDevice(name=name, address=gpu.address, node=gpu.node))
    return located


def visible_gpus(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu | None]:
    """The devices in CUDA's numbering; `None` for one that can't be told, and the list ends at one that is none."""
    selection = environment.get("CUDA_VISIBLE_DEVICES")
    # Unless told otherwise, CUDA numbers by speed: then only equal devices are surely in the order of the bus.
    in_order = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.model for gpu in gpus}) <= 1
    by_number: list[Gpu | None] = [gpu if in_order else None for gpu in gpus]
    if selection is None:
        return by_number
    chosen: list[Gpu | None] = []
    for entry in filter(None, map(str.strip, selection.split(","))):
        if entry.isdecimal():
            if int(entry) >= len(gpus):
                break
            chosen.append(by_number[int(entry)])
        elif entry.startswith(("GPU-", "MIG-")):
            chosen.append(_by_uuid(gpus, entry))
        else:
            break
    return chosen


def _by_uuid(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    """A device by the start of its UUID, or of one of its instances', if that is unique."""
    # The older form of an instance's name holds that of its device.
    whole = re.fullmatch(r"MIG-(GPU-[^/]+)/\d+/\d+", entry)
    start = whole[1] if whole else entry
    found = [gpu for gpu in gpus if any(uuid.startswith(start) for uuid in (gpu.uuid, *gpu.parts))]
    return found[0] if len(found) == 1 else None


def list_gpus(root: Path = Path("/")) -> list[Gpu]:
    """What the NVIDIA driver lists, in the order of the bus: by NVML if its package is there, else by `/proc`."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return _from_proc(root)
    return from_nvml(nvml) or _from_proc(root)


def from_nvml(nvml: Any) -> list[Gpu]:
    """What NVML lists; nothing where it finds no driver."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        gpus = [_describe(nvml, handle) for handle in handles]
    except nvml.NVMLError:
        return []
    finally:
        nvml.nvmlShutdown()
    return sorted(gpus, key=lambda gpu: gpu.address)


def _describe(nvml: Any, handle: Any) -> Gpu:
    return Gpu(
        address=short_address(_string(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        uuid=_string(nvml.nvmlDeviceGetUUID(handle)),
        model=_string(nvml.nvmlDeviceGetName(handle)),
        node=_memory_node(nvml, handle),
        parts=tuple(_parts(nvml, handle)),
    )


def _memory_node(nvml: Any, handle: Any) -> int | None:
    """The only node of the device's memory affinity; drivers that can't say raise, old packages lack the call."""
    try:
        words = nvml.nvmlDeviceGetMemoryAffinity(handle, 16, nvml.NVML_AFFINITY_SCOPE_NODE)
    except (nvml.NVMLError, AttributeError):
        return None
    nodes = [64 * index + bit for index, word in enumerate(words) for bit in range(64) if int(word) >> bit & 1]
    return nodes[0] if len(nodes) == 1 else None


def _parts(nvml: Any, handle: Any) -> list[str]:
    try:
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except (nvml.NVMLError, AttributeError):
        return []
    uuids = []
    for index in range(count):
        try:
            uuids.append(_string(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))))
        except nvml.NVMLError:
            continue  # no instance in this place
    return uuids


def _from_proc(root: Path) -> list[Gpu]:
    gpus = []
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        try:
            text = (path / "information").read_text("utf-8", "replace")
        except OSError:
            continue
        fields = dict(re.findall(r"^(.+?):\s+(.*?)\s*$", text, re.MULTILINE))
        uuid, model = fields.get("GPU UUID", ""), fields.get("Model", "")
        gpus.append(Gpu(address=short_address(path.name), uuid=uuid, model=model))
    return gpus


def short_address(address: str) -> str:
    """An address in the kernel's form: NVML's has a domain of 8 digits, and capitals."""
    domain, _, rest = address.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _string(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
