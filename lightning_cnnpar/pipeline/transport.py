"""Point-to-point messages between the ranks of a replica.

    data        activations and gradients, flat blocks            `pipeline_group`, the run's backend
    control     fixed-size headers and pickled descriptions       `control_group`, gloo on the CPU

Every send is asynchronous. Between two ranks, messages of one direction arrive in the order in which they were sent;
with NCCL, which has neither tags nor two-way queues, each direction of each pair has a communicator of its own, so a
send never waits behind a receive; and the way there and the way back have their own, since schedules mix the two.
"""

import contextlib
import dataclasses
import itertools
import pickle
import struct
import time
import weakref
import zlib
from collections.abc import Callable, Hashable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cnnpar.mesh import Mesh
from lightning_cnnpar.pipeline.errors import CollectiveMismatchError, PeerError

_NUMBERS = struct.Struct("<4q")
_TEXT_BYTES = 224
_HEADER_BYTES = _NUMBERS.size + _TEXT_BYTES
# Tags of the control group: beyond those that other code would choose by hand.
_HEADER_TAG, _BODY_TAG, _DATA_TAG = 1 << 20, 1 << 21, 1 << 22
_CHANNEL_TAG = 1 << 17
BACK_TAG = 1 << 16
"""Added to the tag of what goes back: headers and blocks of the two ways are told apart, also with virtual stages."""

# Types that NCCL can't send by their own name.
_FOREIGN_TO_NCCL = frozenset(
    {torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2}
)

_Lanes = dict[tuple[int, int], dist.ProcessGroup]
_lanes: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, _Lanes]]" = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """What all ranks of a replica must agree on in one network call.

    Attributes:
        network: Name of the network.
        label: Where the user's code is, as in "training_step, batch 3".
        counter: Number of the call.
        facts: What else has to be the same: training flag, grad mode, microbatches.
        channel: Calls of one channel follow each other; those of different ones may be under way at the same time, and
            their messages never meet.
    """

    network: str
    label: str
    counter: int
    facts: str
    channel: int = 0

    @property
    def text(self) -> str:
        """For the reader of an error on another rank."""
        return f"network {self.network!r} in {self.label}, call {self.counter} ({self.facts})"

    @property
    def digest(self) -> int:
        """The same on two ranks exactly when the texts are."""
        return zlib.crc32(self.text.encode())


@dataclasses.dataclass(frozen=True)
class Header:
    """What comes ahead of a bundle: a number and, if the number alone doesn't say it, an object."""

    number: int
    body: Any = None


class Receipt:
    """A receive under way.

    Args:
        wait: Waits for the message; `None` if nothing had to be sent.
        wire: Where it arrives.
        target: Where it is wanted, if that is on another device.
    """

    __slots__ = ("_target", "_wait", "_wire")

    def __init__(self, wait: Callable[[], None] | None, wire: Tensor, target: Tensor) -> None:
        self._wait, self._wire, self._target = wait, wire, target

    def wait(self) -> None:
        """Return once the target is filled (on a GPU: for work that is enqueued after this)."""
        if self._wait is not None:
            self._wait()
            self._wait = None
            if self._target is not self._wire:
                self._target.copy_(self._wire)


@dataclasses.dataclass(frozen=True)
class _Sent:
    """A message on its way, which must stay in memory."""

    work: dist.Work
    message: Tensor
    peer: int
    timeout: timedelta | None


class Link:
    """This rank's connections to the other ranks of its replica.

    Args:
        mesh: The grid; its pipeline size is at least 2.
        device: Where stages compute.

    Attributes:
        seconds_waited: Time that this rank has spent waiting for messages. With NCCL the device waits instead.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self.seconds_waited = 0.0
        self._mesh = mesh
        self._device = device
        self._rank = mesh.pipeline_rank
        self._identity = Identity(network="", label="", counter=0, facts="")
        self._pending: list[_Sent] = []
        self._kept: dict[Hashable, list[_Sent]] = {}
        self._is_nccl = _is_nccl(mesh, device)

    def enter(self, identity: Identity) -> None:
        """Say which call the following messages belong to."""
        self._identity = identity

    # --- data

    def send(self, block: Tensor, peer: int, *, tag: int = 0, key: Hashable = None) -> None:
        """Send a flat block. It must not change before `flush`, or before `settle(key)`."""
        if block.numel():
            route = self._route(block, self._rank, peer, tag)
            wire = block if route.takes(block) else block.cpu()
            work = route.group.send([route.view(wire)], route.index, _DATA_TAG + self._own(tag))
            sent = _Sent(work, wire, peer, route.timeout)
            (self._pending if key is None else self._kept.setdefault(key, [])).append(sent)

    def receive(self, block: Tensor, peer: int, *, tag: int = 0) -> Receipt:
        """Receive into a flat block."""
        if not block.numel():
            return Receipt(None, block, block)
        route = self._route(block, peer, self._rank, tag)
        wire = block if route.takes(block) else torch.empty_like(block, device="cpu")
        work = route.group.recv([route.view(wire)], route.index, _DATA_TAG + self._own(tag))
        return Receipt(lambda: self._wait(work, peer, "receive from", route.timeout), wire, block)

    def flush(self) -> None:
        """Wait until everything that was sent has left this rank."""
        pending, self._pending = self._pending, []
        for key in list(self._kept):
            pending += self._kept.pop(key)
        for sent in pending:
            self._wait(sent.work, sent.peer, "send to", sent.timeout)

    def settle(self, key: Hashable) -> None:
        """Forget the blocks that were sent under `key` and have been received."""
        for sent in self._kept.pop(key, ()):
            self._wait(sent.work, sent.peer, "send to", sent.timeout)

    @contextlib.contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Say which call it was when a collective of the replica fails inside of the block."""
        try:
            yield
        except RuntimeError as error:
            raise self._unanswered(what, "another rank", error) from error

    # --- control

    def send_header(self, header: Header, peer: int, *, tag: int) -> None:
        """Send a header to one rank."""
        body = b"" if header.body is None else pickle.dumps(header.body)
        numbers = _NUMBERS.pack(self._identity.counter, self._identity.digest, header.number, len(body))
        text = self._identity.text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)
        self._send_bytes(numbers + text, peer, _HEADER_TAG + self._own(tag))
        if body:
            self._send_bytes(body, peer, _BODY_TAG + self._own(tag))

    def expect_header(self, peer: int, *, tag: int) -> Callable[[], Header]:
        """Be ready for a header from one rank; the function that is returned waits for it.

        It raises `CollectiveMismatchError` if the other rank is in another call than this one.
        """
        own = self._own(tag)
        receive = self._receive_bytes(_HEADER_BYTES, peer, _HEADER_TAG + own)
        return lambda: self._read(receive(), peer, own)

    # --- inside

    def _own(self, tag: int) -> int:
        return self._identity.channel * _CHANNEL_TAG + tag

    def _send_bytes(self, data: bytes, peer: int, tag: int) -> None:
        message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._pending.append(_Sent(self._control.send([message], peer, tag), message, peer, self._mesh.timeout))

    def _receive_bytes(self, length: int, peer: int, tag: int) -> Callable[[], bytes]:
        message = bytearray(length)
        work = self._control.recv([torch.frombuffer(message, dtype=torch.uint8)], peer, tag)

        def wait() -> bytes:
            self._wait(work, peer, "receive from", self._mesh.timeout)
            return bytes(message)

        return wait

    def _read(self, data: bytes, peer: int, tag: int) -> Header:
        counter, digest, number, length = _NUMBERS.unpack_from(data)
        own = self._identity
        if (counter, digest) != (own.counter, own.digest):
            raise self._mismatch(data[_NUMBERS.size :].decode(errors="replace").strip(), peer)
        if not length:
            return Header(number)
        return Header(number, pickle.loads(self._receive_bytes(length, peer, _BODY_TAG + tag)()))

    def _wait(self, work: dist.Work, peer: int, what: str, timeout: timedelta | None) -> None:
        begin = time.perf_counter()
        try:
            work.wait() if timeout is None else work.wait(timeout)
        except RuntimeError as error:
            raise self._unanswered(what, f"rank {peer}", error) from error
        self.seconds_waited += time.perf_counter() - begin

    @property
    def _control(self) -> dist.ProcessGroup:
        assert self._mesh.control_group is not None
        return self._mesh.control_group

    def _route(self, block: Tensor, source: int, destination: int, tag: int) -> "_Route":
        peer = destination if source == self._rank else source
        if not self._is_nccl:
            assert self._mesh.pipeline_group is not None
            return _Route(self._mesh.pipeline_group, peer, self._mesh.timeout)
        if block.device.type == "cpu":
            return _Route(self._control, peer, self._mesh.timeout)
        way = 2 * self._identity.channel + (tag >= BACK_TAG)
        return _Route(_lanes_of(self._mesh, self._device, way)[source, destination], int(peer > self._rank), None)

    def _mismatch(self, theirs: str, peer: int) -> CollectiveMismatchError:
        return CollectiveMismatchError(
            f"The ranks of a replica are in different network calls. Rank {self._rank} of the replica is in"
            f" {self._identity.text}; rank {peer} is in {theirs}. A network that is cut into stages runs on all ranks"
            f" of its replica together: call it on every rank, in the same order and on the same batch, or use"
            f" `with trainer.strategy.whole_module():` to call it on one rank."
        )

    def _unanswered(self, what: str, peers: str, error: RuntimeError) -> PeerError:
        return PeerError(
            f"Rank {self._rank} of the replica could not {what} {peers} in {self._identity.text}; the limit"
            f" is {self._mesh.timeout.total_seconds():.0f} s. Either {peers} failed (its own error says why), or it"
            f" did not call the network: a network that is cut into stages runs on all ranks of its replica together."
            f" ({str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__})"
        )


@dataclasses.dataclass(frozen=True)
class _Route:
    """Which group a block travels on, the peer's index there, and the time limit that a wait takes.

    NCCL would stop the host for a time limit; its own watchdog ends the run instead.
    """

    group: dist.ProcessGroup
    index: int
    timeout: timedelta | None

    def takes(self, block: Tensor) -> bool:
        """Whether blocks of that device can be sent as they are."""
        return self.timeout is None or block.device.type == "cpu"

    def view(self, block: Tensor) -> Tensor:
        """The block in a type that the backend knows; gloo looks at bytes only."""
        if self.timeout is not None:
            return block
        if block.is_complex():
            return torch.view_as_real(block)
        return block.view(torch.uint8) if block.dtype in _FOREIGN_TO_NCCL else block


def _lanes_of(mesh: Mesh, device: torch.device, way: int) -> _Lanes:
    """A communicator for each direction of each pair of ranks in a replica, made by all of them at the first use.

    Args:
        mesh: The grid.
        device: Where blocks are.
        way: What the lanes are for; each way has its own.
    """
    assert mesh.pipeline_group is not None
    ways = _lanes.setdefault(mesh.pipeline_group, {})
    if way not in ways:
        lanes: _Lanes = {}
        for pair in itertools.permutations(range(mesh.pipeline_size), 2):
            if mesh.pipeline_rank not in pair:
                continue
            ranks = [mesh.global_rank(rank) for rank in pair]
            group = dist.new_group(ranks, timeout=mesh.timeout, backend="nccl", use_local_synchronization=True)
            assert isinstance(group, dist.ProcessGroup)
            lanes[pair] = group
            # Communicators connect at their first message, which takes both ends. Now is when both are here.
            probe, index = torch.zeros(1, device=device), int(sum(pair) - mesh.pipeline_rank > mesh.pipeline_rank)
            (group.send if mesh.pipeline_rank == pair[0] else group.recv)([probe], index, 0).wait()
        ways[way] = lanes
    return ways[way]


def _is_nccl(mesh: Mesh, device: torch.device) -> bool:
    assert mesh.pipeline_group is not None
    if device.type == "cpu":
        return False
    return "nccl" in dist.get_backend_config(mesh.pipeline_group).split(f"{device.type}:")[-1].split(",")[0]
