"""Hooks on parameters that are frozen and unfrozen, copied and pickled."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_cnnpar.data_parallel.accumulation import after_accumulation, before_accumulation, is_trainable_kind

REGISTER = [after_accumulation, before_accumulation]


@pytest.mark.parametrize("register", REGISTER)
def test_hooks_on_a_frozen_parameter_fire_once_it_is_unfrozen(register: Callable[..., object]) -> None:
    weight = nn.Parameter(torch.ones(2), requires_grad=False)
    fired: list[object] = []
    handle = register(("weight", weight), lambda: fired.append(weight.grad))
    assert not weight.requires_grad
    weight.requires_grad_(True)
    torch.autograd.backward((weight * 2).sum())
    weight.requires_grad_(False)
    weight.requires_grad_(True)
    torch.autograd.backward((weight * 2).sum())
    assert len(fired) == 2
    assert (fired[0] is None) == (register is before_accumulation)
    handle.remove()  # type: ignore[attr-defined]
    torch.autograd.backward((weight * 2).sum())
    assert len(fired) == 2


@pytest.mark.parametrize("register", REGISTER)
def test_copies_have_no_hooks(register: Callable[..., object]) -> None:
    layer = nn.Linear(2, 1)
    fired: list[int] = []
    register(("weight", layer.weight), lambda: fired.append(1))
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        twin(torch.ones(1, 2)).sum().backward()
    assert not fired


def test_a_sparse_gradient_is_refused_by_name() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    after_accumulation(("table.weight", next(embedding.parameters())), lambda: None)
    with pytest.raises(RuntimeError, match=r"'table.weight' is sparse .*sparse=False"):
        embedding(torch.tensor([1])).sum().backward()


def test_which_parameters_can_get_gradients() -> None:
    assert is_trainable_kind(nn.Parameter(torch.ones(2)))
    assert is_trainable_kind(nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    assert not is_trainable_kind(nn.Parameter(torch.ones(2, device="meta")))
    assert not is_trainable_kind(nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False))
