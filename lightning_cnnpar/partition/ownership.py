"""Which rank of a replica owns which parameter and buffer, and how that is carried out on a module.

names of the LightningModule       owner      on rank 0            on rank 1
net.conv1.weight                   0          the Parameter        Foreign (meta)
net.fc.weight                      1          Foreign (meta)       the Parameter
temperature                        -          the Parameter        the Parameter
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cnnpar._compat import tensor_slots
from lightning_cnnpar.partition.foreign import Foreign, is_foreign


@dataclasses.dataclass
class Ownership:
    """What has been placed so far; grows as networks are found.

    Attributes:
        rank: Index in the replica of this rank.
        owners: Name of a placed parameter or buffer -> index in the replica of its owner.
        tied: Names that several stages use: every rank keeps them, their gradients are summed over the replica.
    """

    rank: int
    owners: dict[str, int] = dataclasses.field(default_factory=dict)
    tied: set[str] = dataclasses.field(default_factory=set)

    def owner(self, name: str) -> int | None:
        """Index in the replica of the owner; `None` for what every rank keeps."""
        return None if name in self.tied else self.owners.get(name)

    def is_here(self, name: str) -> bool:
        """Whether this rank keeps the values."""
        return self.owner(name) in (None, self.rank)

    def extend(self, owners: Mapping[str, int | None], tied: Iterable[str]) -> bool:
        """Add what another network placed. Whether anything was new."""
        placed = {name: owner for name, owner in owners.items() if owner is not None}
        new = not (placed.keys() <= self.owners.keys() and set(tied) <= self.tied)
        self.owners.update(placed)
        self.tied.update(tied)
        return new


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers, under their first names: a tied tensor comes once."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def canonical_names(module: nn.Module) -> dict[int, str]:
    """`id` of each parameter and buffer -> its first name."""
    return {id(tensor): name for name, tensor in named_tensors(module)}


def global_names(module: nn.Module, root: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Translate names relative to a submodule into first names in the whole module.

    Args:
        module: The whole module.
        root: A submodule of it.
        values: Anything by parameter or buffer name of `root`.
    """
    first = canonical_names(module)
    tensors = dict(root.named_parameters(remove_duplicate=False)) | dict(root.named_buffers(remove_duplicate=False))
    return {first[id(tensors[name])]: value for name, value in values.items() if name in tensors}


def local_names(module: nn.Module, root: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `global_names`: what is known of the tensors of `root`, under its own names."""
    first = canonical_names(module)
    tensors = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
    return {name: values[first[id(tensor)]] for name, tensor in tensors if first.get(id(tensor)) in values}


def release_foreign(module: nn.Module, ownership: Ownership) -> dict[int, Tensor]:
    """Replace every tensor of another stage by a placeholder.

    Args:
        module: The module, or a copy of it with the same names.
        ownership: Who owns what.

    Returns:
        `id` of each replaced tensor -> its placeholder, for the optimizers, which still refer to the tensor.
    """
    made: dict[int, Tensor] = {}
    first = canonical_names(module)
    for store, key, tensor in tensor_slots(module):
        if is_foreign(tensor) or ownership.is_here(first[id(tensor)]):
            continue
        name = first[id(tensor)]
        owner = ownership.owner(name)
        assert owner is not None
        if id(tensor) not in made:
            made[id(tensor)] = Foreign.of(tensor, name, owner)
        store[key] = made[id(tensor)]
    return made


def restore_whole(module: nn.Module, values: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Put real tensors where placeholders stand.

    Args:
        module: A module with placeholders.
        values: Values by the first name of the placeholder.

    Returns:
        `id` of each replaced placeholder -> the tensor put there.
    """
    first = canonical_names(module)
    made: dict[int, Tensor] = {}
    for store, key, tensor in tensor_slots(module):
        if not is_foreign(tensor):
            continue
        if id(tensor) not in made:
            value = values[first[id(tensor)]]
            made[id(tensor)] = (
                nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
            )
        store[key] = made[id(tensor)]
    return made


def replace_in_optimizer(optimizer: torch.optim.Optimizer, replaced: Mapping[int, Tensor]) -> None:
    """Let an optimizer refer to the tensors that took the place of others.

    Groups keep their length and order, so indices, hyperparameters and schedulers stay aligned on all ranks; state of
    parameters that are no longer here is dropped.
    """
    for group in optimizer.param_groups:
        for i, parameter in enumerate(group["params"]):
            substitute = replaced.get(id(parameter))
            if substitute is not None:
                group["params"][i] = substitute
                optimizer.state.pop(parameter, None)
