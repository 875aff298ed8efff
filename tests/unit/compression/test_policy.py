"""Which parameter takes which compressor, and when."""

import pytest

from lightning_cnnpar import ConfigurationError
from lightning_cnnpar.compression import CompressionPolicy, Int2, Int4, Int8, OneBit, PowerSGD, TopK

CONV = (64, 32, 3, 3)


def test_small_and_one_dimensional_parameters_travel_as_they_are() -> None:
    policy = CompressionPolicy.of(Int8(min_numel=1000, exclude=("*.head.*",)))
    assert policy.compressor("a.weight", CONV, 0) == Int8(min_numel=1000, exclude=("*.head.*",))
    assert policy.compressor("a.bias", (4096,), 0) is None
    assert policy.compressor("a.weight", (9, 9, 3, 3), 0) is None
    assert policy.compressor("net.head.weight", CONV, 0) is None


def test_the_first_pattern_that_matches_counts() -> None:
    policy = CompressionPolicy.of({"*.stem.*": None, "*.head.*": "int8", "*": "onebit"})
    assert policy.compressor("net.stem.weight", CONV, 0) is None
    assert policy.compressor("net.head.weight", CONV, 0) == Int8()
    assert policy.compressor("net.weight", CONV, 0) == OneBit()
    assert CompressionPolicy.of({"*.head.*": "int8"}).compressor("net.weight", CONV, 0) is None


@pytest.mark.parametrize(("step", "expected"), [(0, Int2()), (499, Int2()), (500, OneBit()), (9000, OneBit())])
def test_a_schedule_goes_by_steps(step: int, expected: object) -> None:
    assert CompressionPolicy.of({0: "int2", 500: "onebit"}).compressor("a.weight", CONV, step) == expected


def test_a_schedule_may_hold_patterns() -> None:
    policy = CompressionPolicy.of({0: None, 10: {"a.*": "int4", "*": None}})
    assert policy.compressor("a.weight", CONV, 9) is None
    assert policy.compressor("a.weight", CONV, 10) == Int4()
    assert policy.compressor("b.weight", CONV, 10) is None


def test_a_warm_up_takes_two_bits() -> None:
    policy = CompressionPolicy.of(TopK(warmup_steps=5, error_feedback=False))
    assert policy.compressor("a.weight", CONV, 4) == Int2(error_feedback=False)
    assert isinstance(policy.compressor("a.weight", CONV, 5), TopK)


def test_the_share_that_is_sent_falls_in_stages() -> None:
    policy = CompressionPolicy.of(TopK(ratio=0.001, warmup_steps=2, ramp_steps=6))
    taken = [policy.compressor("a.weight", CONV, step) for step in range(9)]
    assert taken[:2] == [Int2()] * 2
    ratios = [what.ratio for what in taken[2:] if isinstance(what, TopK)]
    assert ratios == [0.04, 0.04, 0.01, 0.01, 0.0025, 0.0025, 0.001]
    mild = CompressionPolicy.of(TopK(ratio=0.1, ramp_steps=6)).compressor("a.weight", CONV, 0)
    assert isinstance(mild, TopK)
    assert mild.ratio == 0.1


def test_momentum_belongs_to_the_whole_run() -> None:
    assert CompressionPolicy.of({"a.*": TopK(momentum=0.9), "*": "int8"}).momentum == 0.9
    assert CompressionPolicy.of("int8").momentum == 0
    with pytest.raises(ConfigurationError, match=r"TopK\(momentum=...\) of 0.5 and 0.9"):
        CompressionPolicy.of({0: TopK(momentum=0.5), 9: TopK(momentum=0.9)})


def test_low_rank_is_taken_where_it_is_smaller() -> None:
    policy = CompressionPolicy.of(PowerSGD(rank=4))
    assert policy.compressor("a.weight", (3000, 3), 0) is None
    assert policy.compressor("a.weight", CONV, 0) == PowerSGD(rank=4)
