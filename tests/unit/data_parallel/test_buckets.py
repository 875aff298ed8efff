"""How parameters are laid out in buckets, and how gradients get in and out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_cnnpar.data_parallel.buckets import Bucket, assign_buckets, flat_kind, gradient_bytes


def bucket_of(*parameters: nn.Parameter, group_size: int = 1) -> Bucket:
    members = [(i, (str(i), parameter)) for i, parameter in enumerate(parameters)]
    return Bucket(0, members, None, group_size)


@pytest.mark.parametrize(
    ("order", "num_bytes", "kinds", "expected"),
    [
        ([3, 2, 1, 0], [1, 1, 1, 1], "aaaa", [[3, 2], [1, 0]]),
        ([3, 2, 1, 0], [5, 1, 9, 2], "aaaa", [[3], [2], [1, 0]]),
        ([0, 1, 2, 3, 4], [1] * 5, "ababa", [[0, 2], [1, 3], [4]]),
        # In the order of the last member: bucket `b` waits for position 3.
        ([0, 1, 2, 3], [1, 2, 2, 1], "baab", [[1], [2], [0, 3]]),
        ([], [], "", []),
    ],
)
def test_layout(order: list[int], num_bytes: list[int], kinds: str, expected: list[list[int]]) -> None:
    assert assign_buckets(order, num_bytes, kinds, first_limit=2, limit=4) == expected


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("ab")), max_size=30), st.randoms())
def test_every_parameter_is_in_one_bucket(parameters: list[tuple[int, str]], random: object) -> None:
    order = list(range(len(parameters)))
    random.shuffle(order)  # type: ignore[attr-defined]
    sizes, kinds = [size for size, _ in parameters], [kind for _, kind in parameters]
    buckets = assign_buckets(order, sizes, kinds, first_limit=10, limit=40)
    assert sorted(position for bucket in buckets for position in bucket) == list(range(len(parameters)))
    for bucket in buckets:
        assert len({kinds[position] for position in bucket}) == 1
        assert sum(sizes[position] for position in bucket[:-1]) < 40
    last = [order.index(bucket[-1]) for bucket in buckets]
    assert last == sorted(last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_gradients_survive_the_round_trip(dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.randn(3, 2, dtype=dtype)), nn.Parameter(torch.randn((), dtype=dtype))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    before: list[Tensor] = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    bucket = bucket_of(*parameters, group_size=2)
    bucket.pack_early(1)
    bucket.pack()
    flat = bucket.flat
    assert flat.nbytes == bucket.num_bytes == sum(map(gradient_bytes, parameters))
    assert flat.dtype == flat_kind(parameters[0])[0]
    bucket.unpack({0, 1})
    for parameter, grad in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.grad, grad * 0.5)


def test_memory_format_and_identity_of_gradients_stay() -> None:
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    weight.grad = torch.randn_like(weight)
    mine, values = weight.grad, weight.grad.clone()
    bucket = bucket_of(weight, group_size=2)
    # The part has the strides of the gradient, so that copies run along the memory.
    assert bucket.part(bucket.slots[0]).stride() == weight.stride()
    bucket.pack()
    bucket.unpack({0})
    assert weight.grad is mine
    assert weight.grad.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(weight.grad, values / 2)


def test_odd_gradient_layouts() -> None:
    weight = nn.Parameter(torch.randn(4, 6))
    weight.grad = torch.randn(6, 8).t()[::2]
    values = weight.grad.clone()
    bucket = bucket_of(weight, group_size=4)
    bucket.pack()
    bucket.unpack({0})
    torch.testing.assert_close(weight.grad, values / 4)


def test_missing_gradients_are_zeros_and_come_back_only_where_wanted() -> None:
    present, missing, unwanted = (nn.Parameter(torch.ones(2)) for _ in range(3))
    present.grad = torch.ones(2)
    bucket = bucket_of(present, missing, unwanted, group_size=2)
    bucket.flat.fill_(7.0)  # from the step before
    bucket.pack()
    assert bucket.flat.tolist() == [0.5, 0.5, 0.0, 0.0, 0.0, 0.0]
    bucket.unpack({0, 1})
    assert present.grad.tolist() == [0.5, 0.5]
    assert missing.grad is not None
    assert missing.grad.tolist() == [0.0, 0.0]
    assert unwanted.grad is None
