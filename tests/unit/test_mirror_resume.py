"""Epochs that are interrupted and go on, in the same or another layout."""

import io
import itertools
import random

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_cnnpar.mesh import Coordinates, Mesh
from lightning_cnnpar.mirror import capture_randomness, epoch_position, resume_epoch, shard_loader
from tests.unit.test_mirror_sampling import Numbers, Pairs, RecordedExchange, Stream


class Noisy(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index + torch.rand(1).item() / 2


class Lazy(Sampler):
    """Draws each index when it is asked for."""

    def __len__(self):
        return 12

    def __iter__(self):
        left = list(range(12))
        while left:
            yield left.pop(random.randrange(len(left)))


def _shards(make, num_replicas):
    said = []
    return [
        shard_loader(
            make(),
            Mesh(data_size=num_replicas, coordinates=Coordinates(d, 0)),
            training=True,
            resumable=True,
            exchange=RecordedExchange(num_replicas, d, said),
        )
        for d in range(num_replicas)
    ]


def _ids(batches):
    return [batch.tolist() for batch in batches]


def _saved(position):
    file = io.BytesIO()
    torch.save(position, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _flat(lists):
    return list(itertools.chain.from_iterable(lists))


def _interrupt(loaders, batches):
    """What each replica saw until then, and where replica 0 was."""
    seen = []
    for loader in loaders:
        torch.manual_seed(2)
        seen.append(_ids(itertools.islice(iter(loader), batches)))
    return seen, _saved(epoch_position(loaders[0], batches))


@pytest.mark.case("C53")
@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 1])
def test_each_sample_is_seen_once_in_the_epoch(before, after, workers):
    def make():
        return DataLoader(Numbers(36), batch_size=2, shuffle=True, num_workers=workers)

    torch.manual_seed(2)
    order = _flat(_ids(make()))
    seen, position = _interrupt(_shards(make, before), 3)
    assert sorted(_flat(_flat(seen))) == sorted(order[: 6 * before])
    resumed = _shards(make, after)
    for loader in resumed:
        assert resume_epoch(loader, position)
    left = 36 - 6 * before
    total = 3 + -(-left // (2 * after))
    assert [len(loader) for loader in resumed] == [total] * after
    rest = [_ids(loader) for loader in resumed]
    together = [_flat(parts) for parts in zip(*rest, strict=True)]
    assert _flat(together)[:left] == order[6 * before :]
    assert len(_flat(together)) - left < after
    # The next epoch is a whole one again, and so is its length.
    for loader in resumed:
        torch.manual_seed(3)
        batches = iter(loader)
        assert len(loader) == 36 // (2 * after)
        assert len(_ids(batches)) == len(loader)


@pytest.mark.case("C53")
def test_an_epoch_may_be_interrupted_again():
    def make():
        return DataLoader(Numbers(23), batch_size=2, shuffle=True)

    torch.manual_seed(2)
    order = _flat(_ids(make()))
    _, position = _interrupt(_shards(make, 2), 2)
    (alone,) = _shards(make, 1)
    resume_epoch(alone, position)
    assert _flat(_ids(itertools.islice(iter(alone), 3))) == order[8:14]
    again = _saved(epoch_position(alone, 5))
    rest = _shards(make, 2)
    for loader in rest:
        resume_epoch(loader, again)
    first, second = (_ids(loader) for loader in rest)
    # Nine are left over two replicas; one is repeated to even them out.
    together = _flat(a + b for a, b in zip(first, second, strict=True))
    assert together[:9] == order[14:]
    assert len(together) == 10


@pytest.mark.parametrize("workers", [0, 1])
def test_random_numbers_go_on_as_if_uninterrupted(workers):
    def make():
        return DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers)

    (whole,) = _shards(make, 1)
    torch.manual_seed(2)
    expected = [*_ids(whole), torch.rand(1)]
    (first,) = _shards(make, 1)
    torch.manual_seed(2)
    batches = iter(first)
    seen = [next(batches).tolist() for _ in range(2)]
    position, randomness = _saved(epoch_position(first, 2)), _saved(capture_randomness())
    torch.manual_seed(99)
    (second,) = _shards(make, 1)
    resume_epoch(second, position, randomness)
    got = [*seen, *_ids(second), torch.rand(1)]
    if workers == 0:
        assert got == expected
    assert [[int(x) for x in batch] for batch in got[:-1]] == [[int(x) for x in batch] for batch in expected[:-1]]
    assert got[-1] == expected[-1]


def test_a_sampler_that_draws_as_it_goes():
    def make():
        return DataLoader(Numbers(12), batch_size=2, sampler=Lazy())

    (loader,) = _shards(make, 1)
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(2)]
    before = random.getstate()
    position = _saved(epoch_position(loader, 2))
    assert random.getstate() == before
    rest = _ids(batches)
    assert sorted(_flat(seen + rest)) == list(range(12))
    (other,) = _shards(make, 1)
    resume_epoch(other, position)
    assert _ids(other) == rest


def test_batches_of_a_batch_sampler():
    def make():
        return DataLoader(Numbers(12), batch_sampler=Pairs(12))

    every = _ids(make())
    seen, position = _interrupt(_shards(make, 2), 1)
    assert seen == [every[:1], every[1:2]]
    (alone,) = _shards(make, 1)
    resume_epoch(alone, position)
    assert _ids(alone) == every[2:]


def test_another_data_set_starts_anew():
    _, position = _interrupt(_shards(lambda: DataLoader(Numbers(12), batch_size=2), 1), 2)
    (loader,) = _shards(lambda: DataLoader(Numbers(10), batch_size=2), 1)
    with pytest.warns(UserWarning, match="epoch of 12 samples .* has 10 now"):
        assert not resume_epoch(loader, position)
    assert len(_ids(loader)) == 5


def test_where_there_is_no_position():
    (loader,) = _shards(lambda: DataLoader(Numbers(12), batch_size=2), 1)
    assert epoch_position(loader, 0) is None
    assert len(_ids(loader)) == 6
    assert epoch_position(loader, 6) is None
    for other in (DataLoader(Stream()), [1, 2]):
        (plain,) = _shards(lambda other=other: other, 1)
        assert plain is other
        assert epoch_position(plain, 1) is None
        assert not resume_epoch(plain, {})


@pytest.mark.parametrize("drop_last", [True, False])
def test_one_replica_is_what_it_was(drop_last):
    def make():
        return DataLoader(Numbers(11), batch_size=3, shuffle=True, drop_last=drop_last)

    torch.manual_seed(4)
    plain = make()
    expected = [_ids(plain), _ids(plain), torch.rand(1)]
    (loader,) = _shards(make, 1)
    torch.manual_seed(4)
    assert [_ids(loader), _ids(loader), torch.rand(1)] == expected
    assert len(loader) == len(plain)
