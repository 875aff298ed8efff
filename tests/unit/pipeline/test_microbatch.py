import dataclasses
import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cnnpar import tree
from lightning_cnnpar.pipeline.microbatch import Batch, find_batch, offsets, split_leaf, split_sizes


class _Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class _Sample:
    image: torch.Tensor


def _find(*args: Any, **kwargs: Any) -> Batch:
    return find_batch(*tree.flatten((args, kwargs)))


X = torch.zeros(8, 3, 4, 4)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X,), {}),
        ((X, torch.zeros(8)), {"scale": torch.tensor(2.0), "flag": True, "name": "train"}),
        (({"image": X, "mask": torch.zeros(8, 4)},), {}),
        ((_Pair(X, X),), {}),
        ((_Sample(X),), {}),
        ((X, [torch.zeros(8, 1), torch.zeros(8, 2)]), {}),
        ((), {"image": X, "others": None}),
    ],
)
def test_batch_size_is_found(args: Any, kwargs: Any) -> None:
    assert _find(*args, **kwargs).size == 8


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ((torch.tensor(1.0), 3), "no tensor outside of a list"),
        (([torch.zeros(3, 4, 4)] * 8,), "no tensor outside of a list"),
        ((X, torch.zeros(5, 4)), r"shape \(5, 4\), but the batch seems to have 8"),
        ((X, [torch.zeros(k, 4) for k in range(8)]), r"shape \(0, 4\)"),
        ((X, [torch.zeros(8)] * 8), "a list or array in the inputs has 8 entries"),
        ((X, [(480, 640)] * 8), "a list or array in the inputs has 8 entries"),
        ((X, np.zeros((8, 2))), "a list or array in the inputs has 8 entries"),
    ],
)
def test_what_is_not_certain_is_not_cut(args: Any, reason: str) -> None:
    batch = _find(*args)
    assert batch.size is None
    assert re.search(reason, batch.reason)


def test_one_sample_needs_no_care() -> None:
    assert _find(torch.zeros(1, 3), [torch.zeros(4)]) == Batch(size=1)


def test_the_number_of_arguments_is_no_batch_size() -> None:
    assert _find(torch.zeros(2, 3), torch.zeros(2)).size == 2


@pytest.mark.parametrize(
    ("batch", "microbatches", "sizes"),
    [(8, 3, (3, 3, 2)), (2, 4, (1, 1)), (5, 2, (3, 2)), (8, 1, (8,)), (0, 4, (0,)), (7, 4, (2, 2, 2, 1))],
)
def test_sizes(batch: int, microbatches: int, sizes: tuple[int, ...]) -> None:
    assert split_sizes(batch, microbatches) == sizes


@given(st.integers(0, 100), st.integers(1, 20))
def test_sizes_are_even_and_complete(batch: int, microbatches: int) -> None:
    sizes = split_sizes(batch, microbatches)
    assert sum(sizes) == batch
    assert len(sizes) <= microbatches
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


def test_leaves_are_cut_by_sample() -> None:
    x = torch.arange(5)
    assert [part.tolist() for part in split_leaf(x, 5, (3, 2))] == [[0, 1, 2], [3, 4]]
    assert split_leaf("text", 5, (3, 2)) == ["text", "text"]
    assert split_leaf(torch.tensor(3.0), 5, (3, 2)) == [3.0, 3.0]
    assert offsets((3, 2)) == (0, 3)
