"""Pieces without ranks: which elements are whose, which optimizers may step them, and stand-ins for gradients."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_cnnpar.data_parallel.elementwise import is_elementwise
from lightning_cnnpar.data_parallel.held_gradient import HeldGradient, HeldGradientError
from lightning_cnnpar.data_parallel.sharding import ShardingError, _by_unit, _refuse_unusual
from lightning_cnnpar.data_parallel.shards import Slot, owned_span


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_every_element_belongs_to_one_rank(size: int) -> None:
    numels = [7, 1, 30, 2, 0, 13]
    share = -(-sum(numels) // size)
    offset = 0
    for numel in numels:
        spans = [owned_span(offset, numel, share, rank) for rank in range(size)]
        assert [i for start, stop in spans for i in range(start, stop)] == list(range(numel))
        offset += numel


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), True),
        (lambda p: torch.optim.AdamW(p, weight_decay=0.1, amsgrad=True), True),
        (torch.optim.RMSprop, True),
        (torch.optim.Adagrad, True),
        (torch.optim.Adafactor, False),
    ],
    ids=["sgd", "adamw", "rmsprop", "adagrad", "adafactor"],
)
def test_optimizers_are_tried(make: Any, expected: bool) -> None:
    assert is_elementwise(make([nn.Parameter(torch.ones(3, 2))])) is expected


class ByNorm(torch.optim.SGD):
    """Scales by the norm of the whole, as LARS does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(parameter.detach().norm() / parameter.grad.norm())
        return super().step(closure)


def test_an_optimizer_that_looks_at_norms_is_found_out() -> None:
    assert is_elementwise(ByNorm([nn.Parameter(torch.ones(3))], lr=0.1)) is False


def test_an_optimizer_that_wants_more_than_parameters_is_unknown() -> None:
    class Odd(torch.optim.SGD):
        def __init__(self, parameters: Any, model: nn.Module, lr: float = 0.1) -> None:
            self.model = model
            super().__init__(parameters, lr=lr)

    module = nn.Linear(2, 2)
    assert is_elementwise(Odd(module.parameters(), module)) is None


def _slot() -> Slot:
    parameter = nn.Parameter(torch.ones(2, 3))
    return Slot(
        name="fc.weight",
        parameter=parameter,
        offset=0,
        shape=parameter.shape,
        stride=parameter.stride(),
        span=(0, 4),
        piece=torch.ones(4),
        hollow=torch.tensor(float("nan")).expand(2, 3),
        gradient=torch.ones(4),
    )


def test_a_held_gradient_tells_its_shape_and_refuses_its_values() -> None:
    slot = _slot()
    slot.parameter.grad = HeldGradient.of(slot)
    assert slot.parameter.grad.shape == (2, 3)
    assert not slot.parameter.grad.is_sparse
    with pytest.raises(HeldGradientError, match=r"'fc.weight' was used by `norm` during a forward"):
        slot.parameter.grad.norm()


@pytest.mark.parametrize("foreach", [False, True])
def test_a_held_gradient_is_zeroed_or_dropped_by_the_optimizer(foreach: bool) -> None:
    slot = _slot()
    optimizer = torch.optim.SGD([slot.parameter], lr=0.1, foreach=foreach)
    slot.parameter.grad = HeldGradient.of(slot)
    optimizer.zero_grad(set_to_none=False)
    assert slot.gradient is not None
    assert not slot.gradient.any()
    optimizer.zero_grad()
    assert slot.parameter.grad is None


def test_units_hold_neighbours_of_one_type() -> None:
    sizes = [(f"p{i}", nn.Parameter(torch.zeros(2**17))) for i in range(40)]  # half a MiB each
    half = ("half", nn.Parameter(torch.zeros(8, dtype=torch.bfloat16)))
    units = _by_unit([[named] for named in [*sizes[:20], half, *sizes[20:]]])
    names = [[name for name, _ in unit] for unit in units]
    assert ["half"] in names
    assert sorted(name for unit in names for name in unit) == sorted(["half", *(name for name, _ in sizes)])
    # The last used comes first; a sixteenth of 20 MiB is three of them.
    assert names[0] == ["p37", "p38", "p39"]


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(ShardingError, match=r"'fourier' is torch.complex64 .* Use zero_stage=0"):
        _refuse_unusual([("fourier", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))])
