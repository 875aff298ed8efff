"""The reducer where there is nobody to reduce with."""

import pytest
import torch
from torch import nn

from lightning_cnnpar.data_parallel.comm_hook import ReductionStatistics
from lightning_cnnpar.data_parallel.replicate import GradientReducer
from lightning_cnnpar.mesh import Mesh


def test_one_process_pays_nothing() -> None:
    layer = nn.Linear(2, 1)
    reducer = GradientReducer(list(layer.named_parameters()), mesh=Mesh())
    reducer.begin_backward()  # outside a backward pass: it would fail if it queued anything
    layer(torch.ones(1, 2)).sum().backward()
    with reducer.no_sync():
        layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[2.0, 2.0]]
    assert reducer.statistics == ReductionStatistics()
    reducer.remove()


def test_one_parameter_under_two_names_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"'tied' and 'weight' are the same parameter"):
        GradientReducer([("weight", weight)], mesh=Mesh(), world_parameters=[("tied", weight)])


def test_statistics_are_totals() -> None:
    totals = ReductionStatistics(num_bytes=3, num_rounds=1) + ReductionStatistics(num_bytes=4)
    assert totals == ReductionStatistics(num_bytes=7, num_rounds=1)
