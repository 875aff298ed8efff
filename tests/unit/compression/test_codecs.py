"""Encodings of blocks, as pure functions."""

import pytest
import torch
from torch import Tensor

from lightning_cnnpar.compression import BFloat16, BlockwiseCompressor, Int2, Int4, Int8, OneBit, TopK, from_name
from lightning_cnnpar.compression.base import exponent_of
from lightning_cnnpar.compression.powersgd import orthonormal
from lightning_cnnpar.compression.topk import largest

CODECS = [BFloat16(), Int8(), Int4(), Int2(), OneBit()]


def values(blocks: int = 24) -> Tensor:
    made = torch.randn(blocks * 1024, generator=torch.Generator().manual_seed(0)) / 8
    made[:256] = 0
    made[256:512] = 0.25
    made[512:768] *= 1e-6
    made[768:1024] *= 1e-30
    return made


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_an_encoding_has_the_size_that_it_says_and_is_near(codec: BlockwiseCompressor) -> None:
    original = values()
    payload = codec.encode(original.clone())
    assert payload.dtype == torch.uint8
    assert payload.shape == (codec.payload_size(original.numel()),)
    decoded = codec.decode(payload, torch.empty_like(original))
    # Of normal values: rounding to 2^-9; half a step of 255, 15 and 3 between the extremes; a sign.
    relative = {"bf16": 0.003, "int8": 0.01, "int4": 0.13, "int2": 0.6, "onebit": 0.66}
    error, norm = (decoded - original)[1024:].norm(), original[1024:].norm()
    assert error < relative[codec.name] * norm
    assert error > 0.1 * relative[codec.name] * norm
    assert torch.equal(codec.decode(payload, torch.empty_like(original)), decoded)


@pytest.mark.parametrize(
    ("name", "share"), [("bf16", 0.5), ("int8", 0.26), ("int4", 0.135), ("int2", 0.072), ("onebit", 0.034)]
)
def test_bytes_against_float32(name: str, share: float) -> None:
    codec = from_name(name)
    assert isinstance(codec, BlockwiseCompressor)
    assert codec.payload_size(1 << 20) <= share * 4 * (1 << 20)


@pytest.mark.parametrize("codec", [Int8(), Int4(), Int2()], ids=lambda codec: codec.name)
def test_plain_tensor_operations_give_the_bytes_of_the_kernels(codec: Int8 | Int4 | Int2) -> None:
    rows = values().view(-1, codec.block)
    packed = codec.encode(rows.reshape(-1)).view(len(rows), -1)
    assert torch.equal(codec.encode_plainly(rows), packed)
    decoded = codec.decode(packed.reshape(-1), torch.empty(rows.numel())).view_as(rows)
    assert torch.allclose(codec.decode_plainly(packed), decoded, atol=1e-7)


@pytest.mark.parametrize("factor", [1e-44, 1e-30, 1e-5, 1.0, 1e5, 3e38])
def test_the_power_of_two_brings_values_near_one(factor: float) -> None:
    exponent, finite = exponent_of(torch.tensor([0.3, -0.9, 0.0]) * factor)
    assert finite
    scaled = torch.ldexp(torch.tensor([-0.9]) * factor, -exponent.float()).abs().item()
    assert (0.49 if factor > 1e-36 else 0.0) < scaled <= 2
    assert not exponent_of(torch.tensor([1.0, float("nan")]))[1]
    assert not exponent_of(torch.tensor([1.0, float("-inf")]))[1]


@pytest.mark.parametrize("numel", [1, 100, 65_535, 65_536, 300_001])
@pytest.mark.parametrize("ratio", [1e-5, 0.001, 0.05, 1.0])
def test_the_largest_are_found(numel: int, ratio: float) -> None:
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(1)) ** 3
    count = TopK(ratio=ratio).count(numel)
    chosen = largest(vector, count)
    assert torch.equal(chosen, chosen.unique())
    expected = torch.topk(vector.abs(), count).values.sort().values
    assert torch.equal(vector[chosen].abs().sort().values, expected)


def test_a_sample_that_misleads_changes_nothing() -> None:
    vector = torch.rand(200_000)
    vector[::101] = 100.0
    expected = torch.topk(vector, 10_000).values.sort().values
    assert torch.equal(vector[largest(vector, 10_000)].sort().values, expected)


def test_fewer_than_asked_for_and_what_is_not_finite() -> None:
    vector = torch.zeros(200_000)
    assert len(largest(vector, 1000)) == 0
    vector[7:10] = -2
    assert largest(vector, 1000).tolist() == [7, 8, 9]
    assert len(largest(torch.ones(200_000), 1000)) == 1000
    vector[::3] = torch.nan
    assert len(largest(vector, 1000)) == 1000


def test_a_basis_of_columns_of_zeros_is_finite() -> None:
    columns = torch.zeros(50, 3)
    columns[:, 0] = torch.arange(50.0)
    basis = orthonormal(columns)
    assert torch.allclose(basis.t() @ basis, torch.eye(3), atol=1e-5)
