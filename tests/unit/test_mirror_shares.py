"""How an epoch's order is dealt out to the replicas."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cnnpar.mirror.shares import deal

SIZES = {
    "num_samples": st.integers(0, 200),
    "batch_size": st.integers(1, 9),
    "num_replicas": st.integers(1, 6),
}


def _flat(lists):
    return list(itertools.chain.from_iterable(lists))


def _batches(order, shares):
    """Batches by replica."""
    padded = order + [order[i % len(order)] for i in range(shares.padding)]
    return [[padded[start:stop] for start, stop in shares.spans(d)] for d in range(shares.num_replicas)]


@pytest.mark.parametrize(
    ("num_samples", "training", "drop_last", "expected"),
    [
        (9, True, False, [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [0]]]),
        (9, False, False, [[[0, 1], [4, 5], [7]], [[2, 3], [6], [8]]]),
        (9, True, True, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (11, True, False, [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 0]]]),
        (11, False, False, [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]),
        (1, True, False, [[[0]], [[0]]]),
        (1, False, False, [[[0]], [[0]]]),
        (3, True, True, [[], []]),
        (0, True, False, [[], []]),
    ],
)
def test_the_table(num_samples, training, drop_last, expected):
    shares = deal(num_samples, 2, 2, training=training, drop_last=drop_last)
    assert _batches(list(range(num_samples)), shares) == expected


@given(**SIZES, drop_last=st.booleans())
def test_training_batches_are_those_of_one_process(num_samples, batch_size, num_replicas, drop_last):
    order = list(range(num_samples))
    shares = deal(num_samples, batch_size, num_replicas, training=True, drop_last=drop_last)
    by_replica = _batches(order, shares)
    wide = batch_size * num_replicas
    one_process = [order[i : i + wide] for i in range(0, num_samples, wide)]
    if drop_last:
        one_process = [batch for batch in one_process if len(batch) == wide]
    assert len({tuple(map(len, batches)) for batches in by_replica}) == 1
    together = [_flat(parts) for parts in zip(*by_replica, strict=True)]
    assert len(together) == len(one_process)
    for ours, theirs in zip(together, one_process, strict=True):
        assert ours[: len(theirs)] == theirs
        assert 0 <= len(ours) - len(theirs) < num_replicas
    assert all(shares.num_batches(d) == len(batches) for d, batches in enumerate(by_replica))


@given(**SIZES)
@pytest.mark.case("C39")
def test_evaluation_counts_each_sample_once(num_samples, batch_size, num_replicas):
    order = list(range(num_samples))
    shares = deal(num_samples, batch_size, num_replicas, training=False)
    by_replica = _batches(order, shares)
    seen = [sample for batches in by_replica for batch in batches for sample in batch]
    counts = [len(batches) for batches in by_replica]
    assert [shares.num_batches(d) for d in range(num_replicas)] == counts
    assert all(0 < len(batch) <= batch_size for batches in by_replica for batch in batches)
    if 0 < num_samples < num_replicas:
        assert set(seen) == set(order)
        assert counts == [1] * num_replicas
        return
    assert sorted(seen) == order
    # Equally many batches wherever that can be: always, except for single samples that can't be shared.
    assert max(counts) - min(counts) <= (batch_size == 1)
    # Step by step and replica by replica, predictions come in the order of the samples.
    steps = [batches[step] for step in range(max(counts)) for batches in by_replica if step < len(batches)]
    assert _flat(steps) == order
