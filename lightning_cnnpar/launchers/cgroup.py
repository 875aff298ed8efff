"""How much of the machine's processors the control groups of this process leave it (versions 1 and 2).

    /proc/self/cgroup   which group of each hierarchy, and
    /proc/mounts        where each hierarchy is mounted
          └─► <mount>/<group>, then every group above it, up to <mount>

Inside a container the group's name may be that of the host, while the mount shows the group itself as its root: then
only the last folder of that row exists, which is the right one.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from lightning_cnnpar.launchers.cpulist import clean, parse_list

_CPUSET_FILES = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus", "cpus")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What control groups allow.

    Attributes:
        cpus: CPUs that may be used; `None` where nothing is said.
        quota: CPU seconds that may be spent in a second; `None` is no limit.
    """

    cpus: frozenset[int] | None = None
    quota: float | None = None


def read_limits(root: Path = Path("/")) -> Limits:
    """The limits of this process, as the tree under `root` (its `proc`, and where that says) tells."""
    quotas = [quota for folder in _folders(root, "cpu") if (quota := _quota(folder)) is not None]
    sets = (_cpuset(folder) for folder in _folders(root, "cpuset"))
    return Limits(cpus=next(filter(None, sets), None), quota=min(quotas, default=None))


def _quota(folder: Path) -> float | None:
    words = (_read(folder / "cpu.max") or "").split()
    if not words:
        words = [_read(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    try:
        quota, period = (int(word) for word in words)
    except ValueError:
        return None  # "max", or no such file
    return quota / period if quota > 0 and period > 0 else None


def _cpuset(folder: Path) -> frozenset[int] | None:
    for name in _CPUSET_FILES:
        try:
            if cpus := parse_list(_read(folder / name) or ""):
                return cpus
        except ValueError:
            continue
    return None


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the groups that this process is in, the innermost first, in each hierarchy that may say something."""
    groups = _groups(root)
    for mount, kind, options in _mounts(root):
        if kind == "cgroup2":
            group = groups.get("") or groups.get(controller)
        elif kind == "cgroup" and controller in options:
            group = groups.get(controller)
        else:
            continue
        inside = PurePosixPath((group or "/").lstrip("/"))
        for level in (inside, *inside.parents):
            folder = root / mount.lstrip("/") / level
            if folder.is_dir():
                yield folder


def _groups(root: Path) -> dict[str, str]:
    """Group of each controller; version 2 has one for all, under the empty name."""
    groups: dict[str, str] = {}
    if cpuset := _read(root / "proc/self/cpuset"):
        groups["cpuset"] = cpuset
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        groups.update((controller, path) for controller in controllers.split(","))
    return groups


def _mounts(root: Path) -> Iterator[tuple[str, str, list[str]]]:
    text = _read(root / "proc/self/mounts") or _read(root / "proc/mounts") or ""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 4:
            yield words[1], words[2], words[3].split(",")


def _read(path: Path) -> str | None:
    try:
        return clean(path.read_text("utf-8", "replace"))
    except OSError:
        return None
