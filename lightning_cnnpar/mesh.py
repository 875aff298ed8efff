"""The ranks of a run as a grid with the axes `data` and `pipeline`, and the process groups along them.

World = D x P ranks; the ranks of one replica are neighbours, rank = d * P + p. For D = 2, P = 3:

                 pipeline ->
          data   [0] [1] [2]      replica 0
            |    [3] [4] [5]      replica 1

A row is a replica (`pipeline_group`, `control_group`), a column holds the same stage (`data_group`,
`statistics_group`).
"""

import dataclasses
import hashlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT = timedelta(minutes=30)

# A message between replicas: what it is about, its length, and its beginning.
_TAG, _LENGTH, _BODY = 16, 8, 520


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """Where a rank stands in the grid. Plain arithmetic: no process group is needed.

    Attributes:
        data: Index of the replica, in [0, D).
        pipeline: Index inside the replica, in [0, P).
    """

    data: int
    pipeline: int

    @classmethod
    def of(cls, rank: int, pipeline_size: int) -> "Coordinates":
        """Coordinates of a global rank."""
        return cls(data=rank // pipeline_size, pipeline=rank % pipeline_size)

    def rank(self, pipeline_size: int) -> int:
        """Global rank at these coordinates."""
        return self.data * pipeline_size + self.pipeline


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The grid as one rank sees it.

    Groups are `None` where `torch.distributed` is not initialised (one process) and for axes of size 1, so code that
    communicates asks for the size first.

    Attributes:
        data_size: D, the number of replicas.
        pipeline_size: P, the number of ranks in a replica.
        coordinates: This rank's place.
        data_group: Ranks that hold the same stage, of the run's backend: gradients.
        statistics_group: The same ranks, for collectives inside forward and backward (synchronised BatchNorm), so that
            they never queue behind gradients.
        pipeline_group: Ranks of this replica, of the run's backend: activations.
        control_group: Ranks of this replica, always on CPU (gloo): batches, headers, randomness.
        data_control_group: Ranks that hold the same stage, always on CPU (gloo): sample indices, decisions.
        timeout: How long any of their operations may take.
    """

    data_size: int = 1
    pipeline_size: int = 1
    coordinates: Coordinates = Coordinates(0, 0)
    data_group: dist.ProcessGroup | None = None
    statistics_group: dist.ProcessGroup | None = None
    pipeline_group: dist.ProcessGroup | None = None
    control_group: dist.ProcessGroup | None = None
    data_control_group: dist.ProcessGroup | None = None
    timeout: timedelta = DEFAULT_TIMEOUT

    @property
    def world_size(self) -> int:
        """D x P."""
        return self.data_size * self.pipeline_size

    @property
    def data_rank(self) -> int:
        """Index of this rank's replica."""
        return self.coordinates.data

    @property
    def pipeline_rank(self) -> int:
        """Index of this rank inside its replica."""
        return self.coordinates.pipeline

    def global_rank(self, pipeline_rank: int) -> int:
        """Global rank of a member of this replica, as `torch.distributed` wants it for `src` and `dst`."""
        return self.coordinates.data * self.pipeline_size + pipeline_rank


def create_mesh(data_size: int, pipeline_size: int, *, timeout: timedelta = DEFAULT_TIMEOUT) -> Mesh:
    """Create the process groups of a grid. Every rank of the world calls this, with the same sizes.

    Raises:
        ValueError: If D x P is not the number of ranks that `torch.distributed` was started with.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if data_size * pipeline_size != world_size:
        raise ValueError(
            f"data_parallel_size={data_size} x pipeline_parallel_size={pipeline_size} needs {data_size * pipeline_size}"
            f" ranks, but {world_size} were started. Change one of the sizes, or `devices` and `num_nodes`."
        )
    if world_size == 1:
        return Mesh(timeout=timeout)
    coordinates = Coordinates.of(dist.get_rank(), pipeline_size)
    rows = [[d * pipeline_size + p for p in range(pipeline_size)] for d in range(data_size)]
    columns = _columns(data_size, pipeline_size)

    def groups(members: list[list[int]], own: int, backend: str | None) -> dist.ProcessGroup | None:
        return None if len(members[0]) == 1 else _own_group(members, own, backend, timeout)

    return Mesh(
        data_size=data_size,
        pipeline_size=pipeline_size,
        coordinates=coordinates,
        data_group=groups(columns, coordinates.pipeline, None),
        statistics_group=groups(columns, coordinates.pipeline, None),
        pipeline_group=groups(rows, coordinates.data, None),
        control_group=groups(rows, coordinates.data, "gloo"),
        data_control_group=groups(columns, coordinates.pipeline, "gloo"),
        timeout=timeout,
    )


def create_data_group(mesh: Mesh) -> dist.ProcessGroup:
    """One more group of the ranks that hold this rank's stage, of the run's backend, for collectives of another thread.

    Every rank of the world calls this; D is at least 2.
    """
    return _own_group(_columns(mesh.data_size, mesh.pipeline_size), mesh.pipeline_rank, None, mesh.timeout)


def create_world_group(mesh: Mesh) -> dist.ProcessGroup | None:
    """A group of all ranks on the CPU; `None` for a single rank. Every rank of the world calls this."""
    if mesh.world_size == 1:
        return None
    return _own_group([list(range(mesh.world_size))], 0, "gloo", mesh.timeout)


def _columns(data_size: int, pipeline_size: int) -> list[list[int]]:
    """Ranks that hold the same stage, by stage."""
    return [[d * pipeline_size + p for d in range(data_size)] for p in range(pipeline_size)]


def _own_group(members: list[list[int]], own: int, backend: str | None, timeout: timedelta) -> dist.ProcessGroup:
    # Every rank creates every group, in the same order: `new_group` is a collective of the world.
    created = [dist.new_group(ranks, timeout=timeout, backend=backend) for ranks in members]
    group: dist.ProcessGroup = created[own]  # type: ignore[assignment]  # this rank is a member of that one
    return group


class DifferentPointsError(RuntimeError):
    """The replicas of a run have come to different places of the program."""


def meet(mesh: Mesh, what: str, payload: bytes = b"") -> list[bytes]:
    """Exchange a few bytes between the replicas, who must all be at the same point of the program.

    Everything that goes over `data_control_group` in a step starts here. All messages begin alike, so that replicas
    which are out of step are told so by name, where collectives of different kinds or sizes would hang or end the
    process.

        frame    tag of `what` (16) | length (8) | first 520 bytes of the payload
        then     the payloads, if one of them is longer

    Args:
        mesh: The grid, with more than one replica. The ranks that hold the same stage call this.
        what: What they meet for.
        payload: What this replica says.

    Returns:
        The payloads of all replicas.

    Raises:
        DifferentPointsError: If another replica is there for something else.
    """
    tag = hashlib.blake2b(what.encode(), digest_size=_TAG).digest()
    frame = tag + len(payload).to_bytes(_LENGTH, "little") + payload[:_BODY].ljust(_BODY, b"\0")
    frames = _all_gather(frame, mesh)
    if any(other[:_TAG] != tag for other in frames):
        raise _different_points(what, mesh)
    lengths = [int.from_bytes(other[_TAG : _TAG + _LENGTH], "little") for other in frames]
    if max(lengths) <= _BODY:
        bodies = [other[_TAG + _LENGTH :] for other in frames]
    else:
        bodies = _all_gather(payload.ljust(max(lengths), b"\0"), mesh)
    return [body[:length] for body, length in zip(bodies, lengths, strict=True)]


def _all_gather(data: bytes, mesh: Mesh) -> list[bytes]:
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = [torch.empty_like(own) for _ in range(mesh.data_size)]
    dist.all_gather(rows, own, group=mesh.data_control_group)
    return [row.numpy().tobytes() for row in rows]


def _different_points(what: str, mesh: Mesh) -> DifferentPointsError:
    everywhere: list[Any] = [None] * mesh.data_size
    dist.all_gather_object(everywhere, what, group=mesh.data_control_group)
    seen = "; ".join(f"replica {d} {other}" for d, other in enumerate(everywhere))
    return DifferentPointsError(
        f"The replicas are at different points: {seen}. All replicas must log the same keys with sync_dist=True, and"
        f" make the same network calls and backward passes: log a key on every rank, or with sync_dist=False and"
        f" rank_zero_only=True, and look for branches that depend on the rank or on the local data."
    )
