"""Builds the emulated machine's file system, and starts it.

QEMU (no acceleration), 4 CPUs, 2 nodes
├─ node 0: CPUs 0-1 ── pxb-pcie ── display
└─ node 1: CPUs 2-3 ── pxb-pcie ── display
Debian's cloud kernel + initramfs: busybox, the python that runs the tests, the parts of the package without torch
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import lightning_cnnpar

PACKAGE = Path(lightning_cnnpar.__path__[0])
EMULATOR = "qemu-system-x86_64"
LEFT_OUT = (
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "idlelib",
    "tkinter",
    "ensurepip",
    "lib2to3",
    "__pycache__",
)
INIT = """#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
export PYTHONHOME={home} PYTHONPATH=/package PYTHONDONTWRITEBYTECODE=1 LD_LIBRARY_PATH={libraries}
{python} /package/guest.py
/bin/busybox poweroff -f
"""


def missing() -> str | None:
    """What is not installed, in words."""
    if shutil.which(EMULATOR) is None:
        return f"needs {EMULATOR} (Debian: qemu-system-x86)"
    if shutil.which("busybox") is None:
        return "needs busybox (Debian: busybox-static)"
    if find_kernel() is None:
        return "needs a kernel: set NUMA_VM_KERNEL to the vmlinuz of Debian's linux-image-cloud-amd64"
    return None


def find_kernel() -> Path | None:
    """The kernel that the user names, or an installed cloud kernel."""
    named = os.environ.get("NUMA_VM_KERNEL")
    kernels = [Path(named)] if named else sorted(Path("/boot").glob("vmlinuz-*-cloud-amd64"))
    return next((kernel for kernel in reversed(kernels) if kernel.is_file()), None)


def build(folder: Path) -> Path:
    """Write the initramfs below `folder`."""
    root = folder / "root"
    for name in ("bin", "proc", "sys", "dev", "tmp", "package/lightning_cnnpar/launchers"):
        (root / name).mkdir(parents=True)
    shutil.copy(str(shutil.which("busybox")), root / "bin/busybox")
    libraries = _copy_python(root)
    shutil.copy(Path(__file__).with_name("guest.py"), root / "package/guest.py")
    # Without the package's own `__init__`, which imports torch.
    (root / "package/lightning_cnnpar/__init__.py").touch()
    for name in (
        "config.py",
        *(f"launchers/{part}.py" for part in ("affinity", "binding", "cgroup", "cpulist", "topology")),
    ):
        shutil.copy(PACKAGE / name, root / "package/lightning_cnnpar" / name)
    (root / "package/lightning_cnnpar/launchers/__init__.py").touch()
    init = root / "init"
    init.write_text(INIT.format(home=sys.base_prefix, python=_interpreter(), libraries=":".join(sorted(libraries))))
    init.chmod(0o755)
    archive = folder / "initramfs"
    names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    with archive.open("wb") as file:
        pack = ["busybox", "cpio", "-o", "-H", "newc"]
        subprocess.run(pack, cwd=root, input=names.encode(), stdout=file, stderr=subprocess.DEVNULL, check=True)
    return archive


def _interpreter() -> Path:
    return Path(sys.executable).resolve()


def _copy_python(root: Path) -> set[str]:
    """Copy interpreter and standard library to the same paths, with the shared libraries that they need."""
    standard = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(standard, root / str(standard).lstrip("/"), ignore=shutil.ignore_patterns(*LEFT_OUT, "config-*"))
    extensions = [*(standard / "lib-dynload").glob("_ctypes.*"), *(standard / "lib-dynload").glob("*.so")]
    folders = set()
    for binary in (_interpreter(), *extensions):
        found = subprocess.run(["ldd", str(binary)], text=True, capture_output=True, check=False).stdout
        for library in map(Path, re.findall(r"(/\S+) \(0x", found)):
            _copy(library, root)
            folders.add(str(library.parent))
    _copy(_interpreter(), root)
    return folders


def _copy(file: Path, root: Path) -> None:
    target = root / str(file).lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy(file, target)


def run(initramfs: Path, timeout: float) -> str:
    """Start the machine, wait until it switches itself off, and return what it said.

    Args:
        initramfs: Its file system.
        timeout: In seconds.
    """
    command = [EMULATOR, "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "4", "-m", "1024"]
    command += ["-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"]
    command += ["-kernel", str(find_kernel()), "-initrd", str(initramfs), "-append", "console=ttyS0 quiet panic=-1"]
    for node in range(2):
        command += ["-object", f"memory-backend-ram,id=memory{node},size=512M"]
        command += ["-numa", f"node,nodeid={node},cpus={2 * node}-{2 * node + 1},memdev=memory{node}"]
        command += ["-device", f"pxb-pcie,id=bus{node},bus=pcie.0,bus_nr={64 + 64 * node},numa_node={node}"]
        command += ["-device", f"pcie-root-port,id=port{node},bus=bus{node},chassis={node + 1}"]
        command += ["-device", f"bochs-display,bus=port{node}"]
    return subprocess.run(command, text=True, capture_output=True, timeout=timeout, check=False).stdout
