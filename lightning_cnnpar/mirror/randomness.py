"""Random generators shared by a replica: Python's, NumPy's global one, torch's CPU one and the device's.

replica 0   root ──states──► other ranks of the replica       equal to what one process would draw
   │ digest
   ▼
replica 1   root: reseeded from (digest, 1) ──states──► ...   other noise than replica 0
"""

import ctypes
import hashlib
import pickle
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_cnnpar.mesh import Mesh

NumpyState = tuple[Any, ...]
"""Generator's name, words, position, whether a normal number is left over, and that number."""

States = tuple[Any, NumpyState, torch.Tensor]
"""Python's, NumPy's and torch's state, as their own functions give and take them."""


def states() -> States:
    """The states of the generators on the CPU that loading draws from."""
    return random.getstate(), _numpy_memory.state(), torch.get_rng_state()


def changed_states(before: States) -> bytes:
    """The states that differ from `before`, for `apply_states`; empty if none does."""
    after = states()
    same = (after[0] == before[0], _same_numpy(after[1], before[1]), torch.equal(after[2], before[2]))
    if all(same):
        return b""
    kept = [None if equal else state for equal, state in zip(same, after, strict=True)]
    if kept[2] is not None:
        kept[2] = kept[2].numpy().tobytes()
    return pickle.dumps(kept, protocol=5)


def apply_states(changed: bytes) -> None:
    """Set the generators to what `changed_states` gave on another rank."""
    if not changed:
        return
    python, numpy, torch_state = pickle.loads(changed)
    if python is not None:
        random.setstate(python)
    if numpy is not None:
        np.random.set_state(numpy)
    if torch_state is not None:
        torch.set_rng_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))


def capture_randomness() -> dict[str, Any]:
    """All states in plain types, which `torch.load(weights_only=True)` reads."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = _numpy_memory.state()
    return {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        # As integers of 64 bits: unsigned 32-bit tensors are newer than the files that may have to be read.
        "numpy": [str(name), torch.tensor(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if _cuda_in_use() else None,
    }


def restore_randomness(captured: dict[str, Any]) -> None:
    """Set the generators to what `capture_randomness` gave, here or in another process."""
    version, words, gauss = captured["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = captured["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(captured["torch"])
    if captured["cuda"] is not None and _cuda_in_use():
        torch.cuda.set_rng_state(captured["cuda"])


def share_randomness(mesh: Mesh, seed: int = 0) -> None:
    """Give all ranks of a replica the same states and the replicas different ones. Every rank calls it.

    The first rank of replica 0 keeps its states exactly, so that what it draws is what one process would draw. The
    other replicas' states follow from those and from `seed`.
    """
    if mesh.data_size > 1 and mesh.pipeline_rank == 0:
        agreed = torch.tensor([fingerprint() if mesh.data_rank == 0 else 0], dtype=torch.int64, device="cpu")
        dist.broadcast(agreed, src=0, group=mesh.data_control_group)
        if mesh.data_rank:
            _reseed(f"{int(agreed)}:{seed}:{mesh.data_rank}")
    if mesh.pipeline_size > 1:
        captured = [capture_randomness() if mesh.pipeline_rank == 0 else None]
        dist.broadcast_object_list(captured, src=mesh.global_rank(0), group=mesh.control_group)
        if mesh.pipeline_rank and captured[0] is not None:
            restore_randomness(captured[0])


class StepGenerators:
    """Random states of one of several steps that take turns; the outside goes on as it was.

    Args:
        seed: What the states follow from.
        device: Whose generator belongs to them, beside those of the CPU.
    """

    def __init__(self, seed: str, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._own: tuple[States, torch.Tensor | None] | None = None
        self._outside: tuple[States, torch.Tensor | None] | None = None

    def enter(self) -> None:
        """Make them the present ones."""
        self._outside = self._present()
        if self._own is None:
            _reseed(self._seed)
        else:
            self._set(*self._own)

    def leave(self) -> None:
        """Note them, and give the outside's back."""
        assert self._outside is not None
        self._own = self._present()
        self._set(*self._outside)

    def _present(self) -> tuple[States, torch.Tensor | None]:
        on_device = None
        if self._device.type != "cpu":
            on_device = torch.get_device_module(self._device).get_rng_state(self._device)
        return states(), on_device

    def _set(self, on_cpu: States, on_device: torch.Tensor | None) -> None:
        random.setstate(on_cpu[0])
        np.random.set_state(on_cpu[1])
        torch.set_rng_state(on_cpu[2])
        if on_device is not None:
            torch.get_device_module(self._device).set_rng_state(on_device, self._device)


def step_generators(count: int, device: torch.device) -> list[StepGenerators | None]:
    """Random states for `count` steps that take turns, drawn from the present ones: one number, whatever the count.

    A single step needs none of its own.
    """
    if count == 1:
        return [None]
    drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    return [StepGenerators(f"{drawn}:{number}", device) for number in range(count)]


def fingerprint(captured: States | None = None) -> int:
    """63 bits that tell generator states apart."""
    python, numpy, torch_state = captured or states()
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr(python).encode())
    digest.update(numpy[1].tobytes())
    digest.update(repr(numpy[2:]).encode())
    digest.update(torch_state.numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _reseed(seed: str) -> None:
    digest = hashlib.blake2b(seed.encode(), digest_size=32).digest()
    words = [int.from_bytes(digest[i : i + 8], "little") >> 1 for i in range(0, 32, 8)]
    random.seed(words[0])
    np.random.seed([words[1] >> 32, words[1] & 0xFFFFFFFF])
    # Also seeds the devices.
    torch.manual_seed(words[2])


class _NumpyMemory:
    """NumPy's state, read in 1 us instead of 30 where nothing was drawn.

    Unchanged words mean an unchanged state, except where the second of a pair of normal numbers is left over: using it
    up changes no word. Once such a state has been met, every state is asked for in full.
    """

    def __init__(self) -> None:
        self._words = b""
        self._state: NumpyState = ()
        self._has_normals = False

    def state(self) -> NumpyState:
        words = _numpy_words()
        if self._has_normals or not words or words != self._words:
            full: Any = np.random.get_state()
            self._words, self._state = words, tuple(full)
            self._has_normals |= bool(full[3])
        return self._state


_numpy_memory = _NumpyMemory()


def _numpy_words() -> bytes:
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return b""
    # 624 words and the position among them.
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)


def _same_numpy(one: NumpyState, other: NumpyState) -> bool:
    return one is other or bool(one[2:] == other[2:] and (one[1] == other[1]).all())
