"""What the ranks agree on at the end of a backward pass, in one small exchange over CPU groups.

One byte for each parameter and flag; the largest value wins. The flags are known on the CPU, so neither sending nor
reading them waits for a device.

    over data          touched | late | expected | frozen | shared
    over pipeline                                            shared
"""

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_cnnpar.mesh import Mesh, meet


class GradientAgreementError(RuntimeError):
    """The replicas don't train the same parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """The same on all ranks that hold the same stage.

    Attributes:
        touched: Parameters of the stage that got a gradient on some replica.
        late: Parameters of the stage whose bucket had started on some replica when a gradient arrived.
        shared: The flags of the shared gradients, merged over the world.
    """

    touched: set[int]
    late: set[int]
    shared: bytes


def agree(
    mesh: Mesh, names: Sequence[str], *, touched: bytes, late: bytes, expected: bytes, shared: bytes
) -> Agreement:
    """Merge the flags of this rank with those of the others.

    Args:
        mesh: The grid.
        names: Names of the parameters of the stage, for the message.
        touched: 1 for parameters with a new gradient here.
        late: 1 for parameters whose bucket had started when it came.
        expected: 1 for parameters that were trainable when the pass began.
        shared: Flags that concern the world.

    Raises:
        GradientAgreementError: If a parameter was trainable on some replicas only.
    """
    size = len(names)
    own = bytes(4 * size)
    if mesh.data_size > 1:
        frozen = bytes(1 - flag for flag in expected)
        rows = meet(mesh, "averages gradients", touched + late + expected + frozen + shared)
        merged = bytes(map(max, zip(*rows, strict=True)))
        own, shared = merged[: 4 * size], merged[4 * size :]
    if shared and mesh.pipeline_size > 1:
        shared = _maximum(shared, mesh.control_group)
    touched, late, expected, frozen = (own[i * size : (i + 1) * size] for i in range(4))
    _refuse_disagreement([names[i] for i in range(size) if expected[i] and frozen[i]])
    return Agreement(touched=_ones(touched), late=_ones(late), shared=shared)


def broadcast_order(mesh: Mesh, order: Sequence[int]) -> list[int]:
    """The order that the first replica has."""
    tensor = torch.tensor(order)
    dist.broadcast(tensor, group=mesh.data_control_group, group_src=0)
    return [int(position) for position in tensor.tolist()]


def _maximum(flags: bytes, group: dist.ProcessGroup | None) -> bytes:
    tensor = torch.frombuffer(bytearray(flags), dtype=torch.uint8)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return bytes(tensor.tolist())


def _ones(flags: bytes) -> set[int]:
    return {position for position, flag in enumerate(flags) if flag}


def _refuse_disagreement(names: Sequence[str]) -> None:
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise GradientAgreementError(
            f"requires_grad is True on some replicas and False on others for {', '.join(map(repr, names[:5]))}{more}."
            f" Freeze and unfreeze the same parameters on every rank before the backward pass: by epoch or step, not by"
            f" local data or random numbers."
        )
