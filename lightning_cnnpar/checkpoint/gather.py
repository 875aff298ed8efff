"""Values of other stages, brought to where they are needed: one rank for a file, every rank for a whole module.

All of it runs over the replica's control group on CPU, so it is the same on every device, needs no device memory and
never meets activations on their way. Tensors travel as tensors; only names and shapes are pickled.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cnnpar import tree
from lightning_cnnpar.mesh import Mesh
from lightning_cnnpar.partition.foreign import Foreign, is_foreign


@dataclasses.dataclass(frozen=True)
class _TensorHere:
    """Stands in a pickled structure where a tensor is sent beside it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "_TensorHere":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def send_tree(value: Any, mesh: Mesh, destination: int) -> None:
    """Send nested containers with tensors to a rank of this replica; it calls `receive_tree`.

    Args:
        value: Tuples, lists, dictionaries and dataclasses of tensors and of anything that can be pickled.
        mesh: The grid.
        destination: Index in the replica.
    """
    leaves, spec = tree.flatten(value)
    leaves = [_dense(leaf.detach().cpu()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    described = [_TensorHere.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    rank = mesh.global_rank(destination)
    dist.send_object_list([spec, described], dst=rank, group=mesh.control_group)
    for tensor in tensors:
        if tensor.numel():
            dist.send(as_bytes(tensor), dst=rank, group=mesh.control_group)


def receive_tree(mesh: Mesh, source: int) -> Any:
    """Receive what the rank `source` of this replica sends with `send_tree`."""
    rank = mesh.global_rank(source)
    message: list[Any] = [None, None]
    dist.recv_object_list(message, src=rank, group=mesh.control_group)
    spec, leaves = message
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, _TensorHere):
            leaves[i] = torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype)
            if leaves[i].numel():
                dist.recv(as_bytes(leaves[i]), src=rank, group=mesh.control_group)
    return tree.unflatten(spec, leaves)


def merge_foreign(value: Any, mesh: Mesh, destination: int = 0) -> Any:
    """Fill the placeholders of other stages in a nested container with their owners' values.

    Every rank of the replica calls this with its own copy of the container: the same keys everywhere, each rank with
    real tensors for what it owns. Containers are dictionaries, lists and tuples of any nesting, such as a checkpoint.

    Returns:
        On the rank `destination` of the replica the container with real tensors (CPU where they came from another
        rank); on other ranks `value` itself.
    """
    if mesh.pipeline_size == 1:
        return value
    wanted = [_wanted_from(value, owner) for owner in range(mesh.pipeline_size)] if _is_at(mesh, destination) else None
    message: list[Any] = [wanted]
    dist.broadcast_object_list(message, src=mesh.global_rank(destination), group=mesh.control_group)
    (requests,) = message
    for owner, paths in enumerate(requests):
        if owner == destination or not paths:
            continue
        if mesh.pipeline_rank == owner:
            send_tree([_at(value, path) for path in paths], mesh, destination)
        elif mesh.pipeline_rank == destination:
            value = replaced_in(value, dict(zip(paths, receive_tree(mesh, owner), strict=True)))
    return value


def broadcast_from_owners(tensors: Mapping[str, Tensor], mesh: Mesh, owners: Mapping[str, int]) -> dict[str, Tensor]:
    """Give every rank of the replica the values of all stages.

    Args:
        tensors: The same names on every rank; a placeholder where another rank owns the values.
        mesh: The grid.
        owners: Index in the replica of the owner, for each name.

    Returns:
        Real tensors on CPU for the names whose owner is another rank; for own ones nothing.
    """
    received: dict[str, Tensor] = {}
    for owner in range(mesh.pipeline_size):
        names = [name for name in tensors if owners[name] == owner]
        for name in names:
            here = tensors[name]
            own = mesh.pipeline_rank == owner
            # The memory format is kept: a placeholder has the strides of the tensor it stands for.
            value = here.detach().cpu() if own else torch.empty_like(_plain(here), device="cpu")
            value = _dense(value)
            if value.numel():
                dist.broadcast(as_bytes(value), src=mesh.global_rank(owner), group=mesh.control_group)
            if not own:
                received[name] = value
    return received


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor as bytes, since gloo doesn't know every dtype."""
    flat = torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _dense(tensor: Tensor) -> Tensor:
    """The tensor in its memory format, such as channels_last, or contiguous if it has gaps."""
    return tensor if is_dense(tensor) else tensor.contiguous()


def _plain(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Foreign):
        return tensor
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")


def _is_at(mesh: Mesh, pipeline_rank: int) -> bool:
    return mesh.pipeline_rank == pipeline_rank


Path = tuple[Any, ...]


def found_in(value: Any, test: Callable[[Any], Any], path: Path = ()) -> list[tuple[Path, Any, Any]]:
    """Leaves of nested containers of which `test` is not `None`: where, the leaf, and what `test` says."""
    entries = _entries(value)
    if not entries:
        found = test(value)
        return [] if found is None else [(path, value, found)]
    return [found for key, entry in entries for found in found_in(entry, test, (*path, key))]


def _wanted_from(value: Any, owner: int, path: Path = ()) -> list[Path]:
    if is_foreign(value):
        return [path] if value.owner == owner else []
    return [found for key, entry in _entries(value) for found in _wanted_from(entry, owner, (*path, key))]


def _entries(value: Any) -> Sequence[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    return ()


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def replaced_in(value: Any, found: Mapping[Path, Any], path: Path = ()) -> Any:
    """A copy of the containers in `value` with the leaves at the given paths exchanged."""
    if path in found:
        return found[path]
    if not any(other[: len(path)] == path for other in found):
        return value
    if isinstance(value, Mapping):
        entries = {key: replaced_in(entry, found, (*path, key)) for key, entry in value.items()}
        make: Any = type(value)
        copied = make(entries)
        if hasattr(value, "_metadata"):  # a module's state_dict carries its versions
            copied._metadata = value._metadata
        return copied
    rebuilt = [replaced_in(entry, found, (*path, i)) for i, entry in enumerate(value)]
    return type(value)(*rebuilt) if hasattr(value, "_fields") else type(value)(rebuilt)
