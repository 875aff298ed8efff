"""Sharded samplers of all replicas in one process, against a loader of one process."""

import copy
import itertools
import pickle
import random
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_cnnpar.mesh import Coordinates, Mesh
from lightning_cnnpar.mirror import ShardedIterable, mirror_loader, shard_loader


class RecordedExchange:
    """Replicas that run one after another: the first leaves behind what the others then hear."""

    def __init__(self, size, index, said):
        self.size = size
        self.index = index
        self._said = said
        self._position = 0

    def from_first(self, make):
        if self.index == 0:
            self._said.append(list(make()))
        self._position += 1
        return list(self._said[self._position - 1])

    def gather(self, value):
        return [value] * self.size


class Numbers(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Pairs:
    """A batch sampler that is no `BatchSampler`: neighbours together, pairs shuffled."""

    def __init__(self, size):
        self.size = size
        self.epoch = 0

    def __iter__(self):
        pairs = [[i, i + 1] for i in range(0, self.size, 2)]
        random.Random(self.epoch).shuffle(pairs)
        return iter(pairs)

    def __len__(self):
        return self.size // 2

    def set_epoch(self, epoch):
        self.epoch = epoch


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield from torch.randperm(7).tolist()


def _flat(lists):
    return list(itertools.chain.from_iterable(lists))


def _mesh(num_replicas, replica=0):
    return Mesh(data_size=num_replicas, coordinates=Coordinates(replica, 0))


def _shards(make, num_replicas, *, training=True):
    """The loaders of all replicas; `make` gives what each replica's user code gives."""
    said = []
    return [
        shard_loader(
            make(), _mesh(num_replicas, d), training=training, exchange=RecordedExchange(num_replicas, d, said)
        )
        for d in range(num_replicas)
    ]


def _ids(loader):
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


def _run(make, num_replicas, *, training=True):
    """Batches by replica. All start from the same random state, as replica 0 does with one process."""
    result = []
    for loader in _shards(make, num_replicas, training=training):
        torch.manual_seed(1)
        result.append(_ids(loader))
    return result


@pytest.mark.case("C46")
@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 60),
    batch_size=st.integers(1, 5),
    num_replicas=st.integers(2, 4),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_training_sees_the_batches_of_one_process(size, batch_size, num_replicas, shuffle, drop_last):
    def make(b):
        return DataLoader(Numbers(size), batch_size=b, shuffle=shuffle, drop_last=drop_last)

    torch.manual_seed(1)
    one_process = _ids(make(batch_size * num_replicas))
    by_replica = _run(lambda: make(batch_size), num_replicas)
    together = [_flat(parts) for parts in zip(*by_replica, strict=True)]
    assert [ours[: len(theirs)] for ours, theirs in zip(together, one_process, strict=True)] == one_process
    assert sum(map(len, together)) - sum(map(len, one_process)) < num_replicas


@pytest.mark.case("C39")
@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 8])
def test_evaluation_sees_each_of_seven_once(batch_size):
    loaders = _shards(lambda: DataLoader(Numbers(7), batch_size=batch_size), 2, training=False)
    seen = [_ids(loader) for loader in loaders]
    assert sorted(_flat(_flat(seen))) == list(range(7))
    assert [len(loader) for loader in loaders] == [len(batches) for batches in seen]


def test_fewer_samples_than_replicas_are_repeated_with_a_warning():
    loaders = _shards(lambda: DataLoader(Numbers(2), batch_size=4), 3, training=False)
    with pytest.warns(UserWarning, match="2 samples .* for 3 replicas"):
        assert [_ids(loader) for loader in loaders] == [[[0]], [[1]], [[0]]]


def test_random_numbers_are_drawn_as_in_one_process():
    """The sampler draws its seed after the loader has drawn the workers' one, and again in each epoch."""
    make = [lambda b: DataLoader(Numbers(12), batch_size=b, shuffle=True)]
    torch.manual_seed(3)
    plain = make[0](6)
    expected = [_ids(plain), _ids(plain), torch.rand(1)]
    first, _ = _shards(lambda: make[0](3), 2)
    torch.manual_seed(3)
    got = [_ids(first), _ids(first), torch.rand(1)]
    assert got[2] == expected[2]
    for ours, theirs in zip(got[:2], expected[:2], strict=True):
        assert ours == [batch[:3] for batch in theirs]


def test_a_generator_of_the_users_own_ends_in_the_same_state():
    def make(b, generator):
        return DataLoader(Numbers(12), batch_size=b, shuffle=True, generator=generator)

    plain = torch.Generator().manual_seed(5)
    _ids(make(6, plain))
    generator = torch.Generator().manual_seed(5)
    _ids(_shards(lambda: make(3, generator), 2)[0])
    assert torch.equal(generator.get_state(), plain.get_state())


def test_weights_are_kept():
    def make(b):
        return DataLoader(Numbers(8), batch_size=b, sampler=WeightedRandomSampler([0, 1] * 4, 16))

    torch.manual_seed(1)
    expected = _ids(make(4))
    first, second = _run(lambda: make(2), 2)
    assert [a + b for a, b in zip(first, second, strict=True)] == expected


def test_batches_of_a_batch_sampler_stay_whole():
    def make():
        return DataLoader(Numbers(10), batch_sampler=Pairs(10))

    every = _ids(make())
    first, second = _run(make, 2)
    assert first == every[0::2]
    # Five batches over two replicas: the last round is filled from the start.
    assert second == [*every[1::2], every[0]]
    first, second = _run(make, 2, training=False)
    assert [first, second] == [every[0::2], every[1::2]]


def test_a_batch_sampler_goes_by_its_epoch():
    (loader, _) = _shards(lambda: DataLoader(Numbers(40), batch_sampler=Pairs(40)), 2)
    before = _ids(loader)
    loader.batch_sampler.set_epoch(1)
    assert loader.batch_sampler.size == 40
    assert _ids(loader) != before


def test_the_samplers_epoch_is_reached_where_trainers_look():
    class WithEpoch(SequentialSampler):
        def set_epoch(self, epoch):
            self.epoch = epoch

    sampler = WithEpoch(Numbers(4))
    loader, _ = _shards(lambda: DataLoader(Numbers(4), sampler=sampler, batch_size=2), 2)
    loader.batch_sampler.sampler.set_epoch(7)
    assert (sampler.epoch, loader.sampler, loader.batch_size, loader.batch_sampler.drop_last) == (7, sampler, 2, False)


def test_a_plain_batch_sampler_is_a_batch_size():
    def make():
        return DataLoader(Numbers(10), batch_sampler=BatchSampler(SequentialSampler(Numbers(10)), 3, True))

    assert _run(make, 2) == [[[0, 1, 2]], [[3, 4, 5]]]


def test_without_batching_each_index_is_a_batch():
    first, second = _run(lambda: DataLoader(Numbers(5), batch_size=None), 2, training=False)
    assert [first, second] == [[0, 2, 4], [1, 3]]
    first, second = _run(lambda: DataLoader(Numbers(5), batch_size=None), 2)
    assert [first, second] == [[0, 2, 4], [1, 3, 0]]


def test_samplers_without_an_end_or_a_length():
    first, second = _shards(lambda: DataLoader(Numbers(7), sampler=Endless(), batch_size=2), 2)
    torch.manual_seed(1)
    plain = iter(DataLoader(Numbers(7), sampler=Endless(), batch_size=4))
    expected = [next(plain).tolist() for _ in range(5)]
    parts = []
    for loader in (first, second):
        torch.manual_seed(1)
        parts.append([batch.tolist() for batch in itertools.islice(loader, 5)])
    assert [a + b for a, b in zip(*parts, strict=True)] == expected
    with pytest.raises(TypeError):
        len(first)


def test_a_sampler_without_a_length_ends_everywhere():
    class Few(Sampler):
        def __iter__(self):
            return iter(range(7))

    make = lambda: DataLoader(Numbers(7), sampler=Few(), batch_size=2)  # noqa: E731
    assert _run(make, 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]
    assert _run(make, 2, training=False) == [[[0, 1], [4, 5]], [[2, 3], [6]]]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers(workers):
    def make(b):
        return DataLoader(Numbers(21), batch_size=b, shuffle=True, num_workers=workers, persistent_workers=True)

    torch.manual_seed(1)
    expected = _ids(make(4))
    first, second = _run(lambda: make(2), 2)
    assert [(a + b)[: len(c)] for a, b, c in zip(first, second, expected, strict=True)] == expected


def test_the_users_loader_stays_as_it_is():
    class Own(DataLoader):
        def __init__(self, needed, **kwargs):
            self.needed = needed
            super().__init__(Numbers(6), **kwargs)

    loader = Own("argument", batch_size=2)
    sharded, _ = _shards(lambda: loader, 2)
    assert isinstance(sharded, Own)
    assert sharded.needed == "argument"
    assert _ids(loader) == [[0, 1], [2, 3], [4, 5]]
    assert _ids(sharded) == [[0, 1], [4]]
    assert _ids(copy.deepcopy(sharded)) == _ids(loader)


def test_a_pickle_holds_what_the_user_gave():
    sharded, _ = _shards(lambda: DataLoader(Numbers(6), batch_size=2), 2)
    assert _ids(pickle.loads(pickle.dumps(sharded))) == [[0, 1], [2, 3], [4, 5]]


def test_one_replica_needs_nothing():
    loader = DataLoader(Numbers(6))
    assert shard_loader(loader, Mesh(), training=True) is loader
    assert mirror_loader(loader, Mesh(), training=True) is loader


@pytest.mark.case("C46")
def test_a_distributed_sampler_must_fit():
    def make(num_replicas, rank):
        sampler = DistributedSampler(Numbers(8), num_replicas=num_replicas, rank=rank)
        return DataLoader(Numbers(8), sampler=sampler, batch_size=2)

    fitting = make(2, 1)
    assert shard_loader(fitting, _mesh(2, 1), training=False) is fitting
    for wrong in (make(4, 1), make(2, 0)):
        with pytest.raises(ValueError, match=r"num_replicas=2, rank=1"):
            shard_loader(wrong, _mesh(2, 1), training=True)
    # One replica over two ranks.
    with pytest.raises(ValueError, match=r"num_replicas=2 and rank=1.*1 replicas"):
        shard_loader(make(2, 1), Mesh(pipeline_size=2, coordinates=Coordinates(0, 1)), training=True)


def test_data_sets_of_different_size_are_named():
    said = []
    for d, size in enumerate((8, 6)):
        loader = DataLoader(Numbers(size), batch_size=2)
        sharded = shard_loader(loader, _mesh(2, d), training=True, exchange=RecordedExchange(2, d, said))
        if d:
            with pytest.raises(ValueError, match=r"replica 1 has 6 entries, that of replica 0 has 8"):
                next(iter(sharded))
        else:
            next(iter(sharded))


@pytest.mark.case("C48")
def test_a_stream_is_left_alone_with_a_warning():
    with pytest.warns(UserWarning, match="`Stream` can't be divided among the 2 replicas"):
        loader = shard_loader(DataLoader(Stream(), batch_size=2), _mesh(2), training=False)
    assert len(_ids(loader)) == 5
    declared = Stream()
    declared.shards_itself = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shard_loader(DataLoader(declared, batch_size=2), _mesh(2), training=True)
        shard_loader(DataLoader(Stream(), batch_size=2), _mesh(2, 1), training=True)


@pytest.mark.case("C48")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sharded_stream_loads_each_item_once(workers):
    loader = DataLoader(ShardedIterable(Stream(), transform=float), batch_size=2, num_workers=workers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaders = [shard_loader(loader, _mesh(2, d), training=False) for d in range(2)]
    seen = [_flat(_ids(part)) for part in loaders]
    assert sorted(_flat(seen)) == list(range(10))
    assert list(map(len, seen)) == [5, 5]


def test_a_random_sampler_with_more_draws_than_samples():
    def make(b):
        return DataLoader(Numbers(5), batch_size=b, sampler=RandomSampler(Numbers(5), num_samples=12))

    torch.manual_seed(1)
    expected = _ids(make(4))
    first, second = _run(lambda: make(2), 2)
    assert [a + b for a, b in zip(first, second, strict=True)] == expected
