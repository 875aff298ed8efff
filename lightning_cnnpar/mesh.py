"""The ranks of a run as a grid with the axes `data` and `pipeline`, and the process groups along them.

World = D x P ranks; the ranks of one replica are neighbours, rank = d * P + p. For D = 2, P = 3:

                 pipeline ->
          data   [0] [1] [2]      replica 0
            |    [3] [4] [5]      replica 1

A row is a replica (`pipeline_group`, `control_group`), a column holds the same stage (`data_group`,
`statistics_group`).
"""

import dataclasses
from datetime import timedelta

import torch.distributed as dist

DEFAULT_TIMEOUT = timedelta(minutes=30)


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
    columns = [[d * pipeline_size + p for d in range(data_size)] for p in range(pipeline_size)]

    def groups(members: list[list[int]], own: int, backend: str | None) -> dist.ProcessGroup | None:
        if len(members[0]) == 1:
            return None
        # Every rank creates every group, in the same order: `new_group` is a collective of the world.
        created = [dist.new_group(ranks, timeout=timeout, backend=backend) for ranks in members]
        group: dist.ProcessGroup = created[own]  # type: ignore[assignment]  # this rank is a member of that one
        return group

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
