"""Loaders that are mirrored over the ranks of a replica, against one process."""

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from lightning_cnnpar.mesh import Mesh, create_mesh
from lightning_cnnpar.mirror import frames, mirror_loader, shard_loader
from lightning_cnnpar.mirror.randomness import share_randomness
from tests.ranks import RankError, run_ranks


class Augmented(Dataset):
    """Draws from all generators, and answers on the loading rank only."""

    def __init__(self, size: int = 10, only_on: int | None = None) -> None:
        self.size = size
        self.only_on = only_on

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if self.only_on is not None and dist.is_initialized() and dist.get_rank() != self.only_on:
            raise AssertionError("the data set was touched on a rank that doesn't load")
        noise = torch.rand(2) + random.random() + np.random.randn()
        return {"image": noise, "label": index, "name": f"image {index}"}


class Broken(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        if index == 4:
            raise FileNotFoundError("no image 4")
        return index


class StubbornError(Exception):
    """Can't be built from its message alone."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


class Fatal(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        raise StubbornError(5, "no such thing")


class Stream(IterableDataset):
    def __init__(self, size: int, fails_at: int | None = None) -> None:
        self.size = size
        self.fails_at = fails_at
        self.shards_itself = True

    def __iter__(self) -> Any:
        for index in range(self.size):
            if index == self.fails_at:
                raise OSError("the disk is gone")
            yield index


def _draws() -> list[float]:
    return [random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item()]


def _seed(rank: int = 0) -> None:
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)


def _as_plain(batch: Any) -> Any:
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def _two_epochs(loader: Any) -> list[Any]:
    """Batches, and what the user's step would draw after each."""
    return [(_as_plain(batch), _draws()) for _ in range(2) for batch in loader]


def _loader(workers: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(
        Augmented(**options), batch_size=4, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )


# --- one replica of two ranks -------------------------------------------------------------------------------------


def _epochs_on(rank: int, world_size: int, workers: int) -> Any:
    mesh = create_mesh(1, world_size)
    _seed(rank)
    share_randomness(mesh)
    loader = mirror_loader(_loader(workers, only_on=None if workers else 0), mesh)
    assert isinstance(loader, DataLoader)
    assert (len(loader), loader.batch_size, len(loader.dataset)) == (3, 4, 10)
    result = _two_epochs(loader)
    assert (loader._iterator is not None) == (rank == 0 and workers > 0)
    return result


@pytest.mark.case("C34")
@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (2, 2), (3, 0)])
def test_batches_and_draws_are_those_of_one_process(ranks, workers):
    _seed()
    torch.manual_seed(0)
    expected = _two_epochs(_loader(workers))
    by_rank = run_ranks(ranks, _epochs_on, workers)
    if workers:
        # A worker's Python and NumPy generators follow the base seed too.
        expected = [({**batch, "image": None}, draws) for batch, draws in expected]
        assert all(result == by_rank[0] for result in by_rank)
        by_rank = [[({**batch, "image": None}, draws) for batch, draws in result] for result in by_rank]
    for result in by_rank:
        assert result == expected


def _failing_on(rank: int, world_size: int, workers: int) -> Any:
    mesh = create_mesh(1, world_size)
    loader = mirror_loader(DataLoader(Broken(), batch_size=2, num_workers=workers), mesh)
    seen = []
    try:
        for batch in loader:
            seen.append(batch.tolist())
    except Exception as caught:
        # The channel goes on afterwards.
        after = [batch.tolist() for batch in mirror_loader(DataLoader([7, 8]), mesh)]
        return seen, type(caught).__name__, str(caught), "".join(caught.__notes__), after
    return seen


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_of_the_loader_is_raised_on_every_rank(workers):
    first, second = run_ranks(2, _failing_on, workers)
    assert first[:2] == second[:2] == ([[0, 1], [2, 3]], "FileNotFoundError")
    assert first[2] == second[2]
    assert "no image 4" in second[2]
    assert "on rank 0, which loads for replica 0" in first[3]
    assert "on rank 0, which loads for replica 0" in second[3]
    assert "__getitem__" in second[3]
    assert first[4] == second[4] == [[7], [8]]


def _stubborn_on(rank: int, world_size: int) -> Any:
    try:
        next(iter(mirror_loader(DataLoader(Fatal()), create_mesh(1, world_size))))
    except Exception as caught:
        return type(caught).__name__, str(caught)
    return None


def test_an_exception_that_cannot_travel_is_quoted():
    first, second = run_ranks(2, _stubborn_on)
    assert first == ("StubbornError", "5: no such thing")
    assert second[0] == "RuntimeError"
    assert second[1].startswith("StubbornError: 5: no such thing")
    assert "__getitem__" in second[1]


def _unpicklable_on(rank: int, world_size: int) -> Any:
    try:
        next(iter(mirror_loader([lambda: None], create_mesh(1, world_size))))
    except TypeError as caught:
        return str(caught)
    return None


def test_a_batch_that_cannot_travel_is_an_error_everywhere():
    first, second = run_ranks(2, _unpicklable_on)
    assert first == second
    assert "top of a module" in first


def _many_on(rank: int, world_size: int) -> Any:
    """Restarts, loaders that take turns, and every kind of iterable."""
    # Not at the top: the ranks of all other tests start without Lightning, in a fraction of the time.
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    mesh = create_mesh(1, world_size)
    only = lambda values: values if rank == 0 else [None] * len(values)  # noqa: E731
    letters, numbers = mirror_loader(only(["a", "b", "c"]), mesh), mirror_loader(DataLoader(range(4)), mesh)
    result: dict[str, Any] = {"lengths": (len(letters), len(numbers))}
    for index, _ in enumerate(numbers):
        if index == 1:
            break
    result["turns"] = [(letter, number.item()) for letter, number in zip(letters, numbers, strict=False)]
    result["combined"] = [
        (batch["a"], None if batch["b"] is None else batch["b"].item())
        for batch, _, _ in CombinedLoader({"a": letters, "b": numbers}, "max_size")
    ]
    generator = mirror_loader((value for value in only([1, 2])), mesh)
    result["generator"] = [list(generator), list(generator)]
    sizes = [0, 1, 5000, 70_000, 300_000, 2_000_000, 10]
    big = mirror_loader(only([[torch.full((n,), 3, dtype=torch.uint8), torch.arange(n), f"{n}"] for n in sizes]), mesh)
    result["big"] = [[batch[0].numel(), int(batch[1].sum()), batch[2]] for batch in big]
    assert [n for n, _, _ in result["big"]] == sizes
    many = mirror_loader(only([[torch.full((50_000,), i) for i in range(30)]]), mesh)
    result["many"] = [[int(tensor.float().mean()) for tensor in batch] for batch in many]
    with torch.inference_mode():
        inside = [batch.is_inference() for batch in mirror_loader(DataLoader(range(2)), mesh)]
    outside = [batch.is_inference() for batch in mirror_loader(DataLoader(range(2)), mesh)]
    result["inference"] = inside + outside
    return result


def test_loaders_of_every_kind_take_turns():
    first, second = run_ranks(2, _many_on)
    assert first == second
    assert first["lengths"] == (3, 4)
    assert first["turns"] == [("a", 0), ("b", 1), ("c", 2)]
    assert first["combined"] == [("a", 0), ("b", 1), ("c", 2), (None, 3)]
    assert first["generator"] == [[1, 2], []]
    assert first["many"] == [list(range(30))]
    assert first["inference"] == [True, True, False, False]


def _out_of_step_on(rank: int, world_size: int) -> Any:
    mesh = create_mesh(1, world_size)
    one, other = (iter(mirror_loader([1, 2, 3], mesh)) for _ in range(2))
    return next(one if rank == 0 else other)


def test_ranks_that_ask_for_different_batches_are_told():
    with pytest.raises(
        RankError, match=r"pipeline rank 1 asked for frame 1 of loader 1, .* frame 1 of loader 0 \(batch\)"
    ):
        run_ranks(2, _out_of_step_on)


def _predict_on(rank: int, world_size: int) -> Any:
    from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper

    mesh = create_mesh(world_size // 2, 2)
    sampler = BatchSampler(SequentialSampler(range(7)), 2, False)
    loader = DataLoader(range(7), batch_sampler=_IndexBatchSamplerWrapper(sampler), num_workers=1)
    mirrored = mirror_loader(shard_loader(loader, mesh, training=False), mesh)
    indices = []
    for index, batch in enumerate(mirrored):
        assert isinstance(mirrored.batch_sampler, _IndexBatchSamplerWrapper)
        indices.append(mirrored.batch_sampler.seen_batch_indices[index])
        assert batch.tolist() == indices[-1]
    return indices


def test_predictions_know_their_samples_on_every_rank():
    by_rank = run_ranks(4, _predict_on)
    assert by_rank[0] == by_rank[1] == [[0, 1], [4, 5]]
    assert by_rank[2] == by_rank[3] == [[2, 3], [6]]
    assert run_ranks(2, _predict_on) == [[[0, 1], [2, 3], [4, 5], [6]]] * 2


def _checked_on(rank: int, world_size: int, fault: str) -> Any:
    mesh = create_mesh(1, world_size)
    share_randomness(mesh)
    batches = iter(mirror_loader([torch.zeros(3), torch.ones(3), {"a": [1, "b", None, np.arange(2)]}], mesh))
    next(batches)
    if fault == "draws" and rank == 1:
        torch.rand(1)
    if fault == "batch":
        # A receiver that alters what it was sent, which only a broken transport would do.
        unpack = frames.unpack
        frames.unpack = lambda *arguments: (unpack(*arguments)[0] + 1, None)
    return [next(batches), next(batches)][1]["a"][:3]


def test_debug_mode_names_the_rank_that_differs(monkeypatch):
    monkeypatch.setenv("CNNPAR_DEBUG_BATCHES", "1")
    assert run_ranks(2, _checked_on, "") == [[1, "b", None]] * 2
    with pytest.raises(RankError, match=r"Batch 1: the random state before it differs on rank\(s\) \[1\] from rank 0"):
        run_ranks(2, _checked_on, "draws")
    with pytest.raises(RankError, match=r"Batch 1: the content differs on rank\(s\) \[1\] from rank 0"):
        run_ranks(2, _checked_on, "batch")


# --- several replicas ---------------------------------------------------------------------------------------------


def _ids_on(rank: int, world_size: int, training: bool) -> Any:
    mesh = create_mesh(2, world_size // 2)
    _seed(rank)
    share_randomness(mesh)
    loader = DataLoader(Augmented(7), batch_size=2, shuffle=training)
    mirrored = mirror_loader(shard_loader(loader, mesh, training=training), mesh, training=training)
    epochs = [[batch["label"].tolist() for batch in mirrored] for _ in range(2)]
    return epochs, [_draws() for _ in range(2)], len(mirrored)


@pytest.mark.case("C46")
@pytest.mark.case("C33")
@pytest.mark.parametrize("training", [True, False])
def test_a_grid_of_two_by_two(training):
    by_rank = run_ranks(4, _ids_on, training)
    assert by_rank[0] == by_rank[1]
    assert by_rank[2] == by_rank[3]
    (first, noise, length), (second, other_noise, _) = by_rank[0], by_rank[2]
    assert all(one != other for one, other in zip(noise[0] + noise[1], other_noise[0] + other_noise[1], strict=True))
    _seed()
    plain = DataLoader(Augmented(7), batch_size=4, shuffle=training)
    for ours, theirs in zip(first, second, strict=True):
        expected = [batch["label"].tolist() for batch in plain] if training else None
        together = [a + b for a, b in zip(ours, theirs, strict=True)]
        assert len(together) == length == 2
        if training:
            assert together[0] == expected[0]
            assert together[1][:3] == expected[1]
        else:
            assert sorted(sum(together, [])) == list(range(7))  # noqa: RUF017
        if training:
            # The data set's own draws differ after the first batch, since each replica loads half of it.
            break


def _uneven_on(rank: int, world_size: int, pipeline_size: int, kind: str) -> Any:
    mesh = create_mesh(world_size // pipeline_size, pipeline_size)
    size = 3 if mesh.data_rank == 1 else 5
    loaders: dict[str, Any] = {
        "stream": DataLoader(Stream(size), batch_size=None),
        "list": list(range(size)),
        "generator": (value for value in range(size)),
        "failing": DataLoader(Stream(5, fails_at=2 if mesh.data_rank else None), batch_size=None),
        "evaluation": DataLoader(Stream(size), batch_size=None),
    }
    training = kind != "evaluation"
    loader = mirror_loader(shard_loader(loaders[kind], mesh, training=training), mesh, training=training)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            seen: Any = [int(batch) for batch in loader]
        except Exception as error:
            seen = f"{type(error).__name__}: {error}"
    return seen, [str(warning.message) for warning in caught]


@pytest.mark.case("C36")
@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["stream", "list", "generator"])
@pytest.mark.parametrize("pipeline_size", [1, 2])
def test_uneven_data_ends_everywhere_at_once(kind, pipeline_size):
    by_rank = run_ranks(2 * pipeline_size, _uneven_on, pipeline_size, kind, timeout=25)
    assert [seen for seen, _ in by_rank] == [[0, 1, 2]] * (2 * pipeline_size)
    told = [text for _, texts in by_rank for text in texts if "ran out" in text]
    assert len(told) == 1
    assert "Replica 1 ran out of data after 3 batches" in told[0]
    assert told[0] in by_rank[0][1]


def _shared_list_on(rank: int, world_size: int) -> Any:
    """Loaders that aren't sharded, as with `use_distributed_sampler=False`."""
    mesh = create_mesh(2, 1)
    with warnings.catch_warnings(record=True):
        return [int(batch) for batch in mirror_loader(DataLoader(range(3 + rank)), mesh, training=True)]


@pytest.mark.case("C36")
def test_loaders_that_are_not_sharded_end_together_too():
    assert run_ranks(2, _shared_list_on) == [[0, 1, 2]] * 2


@pytest.mark.case("C36")
def test_evaluation_needs_no_agreement():
    assert run_ranks(2, _uneven_on, 1, "evaluation") == [([0, 1, 2, 3, 4], []), ([0, 1, 2], [])]


def test_a_failing_replica_ends_the_others():
    by_rank = run_ranks(4, _uneven_on, 2, "failing")
    texts = [seen for seen, _ in by_rank]
    assert (
        texts[0] == texts[1] == "RuntimeError: The data loader of replica 1 failed at batch 2; see that rank's error."
    )
    assert texts[2] == texts[3] == "OSError: the disk is gone"


def _sampler_fails_on(rank: int, world_size: int) -> Any:
    mesh: Mesh = create_mesh(2, 1)

    class Failing(torch.utils.data.Sampler):
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            raise KeyError("weights")

    loader = DataLoader(Augmented(4), sampler=Failing())
    try:
        next(iter(shard_loader(loader, mesh, training=True)))
    except KeyError as error:
        return str(error)
    return None


def test_a_failing_sampler_fails_on_every_replica():
    assert run_ranks(2, _sampler_fails_on) == ["'weights'", "'weights'"]
