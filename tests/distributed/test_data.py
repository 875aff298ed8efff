"""What the replicas train on is what one process trains on, whichever loader brings it; and what they draw at random."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from lightning_cnnpar.mirror import ShardedIterable
from tests import nets
from tests.fitting import (
    Case,
    Layout,
    Record,
    assert_same,
    fit_alone,
    fit_on_ranks,
    fit_several_on_ranks,
    loaders,
    make_strategy,
    make_trainer,
)
from tests.ranks import run_ranks

# Of plain Lightning, in this process.
pytestmark = pytest.mark.filterwarnings("ignore")

GRID = Layout(2, 2, {"num_microbatches": 2})


# ---- every way to load -----------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """The images of a data set, one after the other."""

    def __init__(self, count: int, stop: int | None = None) -> None:
        self.images = nets.Images(count)
        self.stop = stop

    def __iter__(self) -> Iterator[Any]:
        return iter([self.images[i] for i in range(len(self.images))][: self.stop])


class SeveralSets(nets.Classifier):
    """Trains on a dictionary or list of batches, validates on several sets."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        images = torch.cat([part[0] for part in parts])
        return super().training_step((images, torch.cat([part[1] for part in parts])), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


class ReloadedEachEpoch(nets.Classifier):
    """Makes its loader anew each epoch, with other data."""

    def train_dataloader(self) -> Any:
        replicas = (
            self.trainer.strategy.distributed_sampler_kwargs["num_replicas"] if self.trainer.world_size > 1 else 1
        )
        return DataLoader(nets.Images(16, seed=self.current_epoch), 8 // replicas)


class GathersOutputs(nets.Classifier):
    """A loss over the samples of all replicas, through `self.all_gather`."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        outputs = self.all_gather(self.model(images), sync_grads=True).view(-1, 4)
        likeness = outputs @ outputs.T
        loss = self._loss(outputs, self.all_gather(labels).view(-1)) + 0.1 * likeness.logsumexp(dim=1).mean()
        self.log("train_loss", loss, sync_dist=True)
        return loss


def shuffled(replicas: int) -> dict[str, Any]:
    return {"train_dataloaders": DataLoader(nets.Images(24), 8 // replicas, shuffle=True)}


def several_val_sets(replicas: int) -> dict[str, Any]:
    batch = 8 // replicas
    return {
        "train_dataloaders": [DataLoader(nets.Images(16), batch // 2), DataLoader(nets.Images(16, seed=5), batch // 2)],
        "val_dataloaders": [DataLoader(nets.Images(12), batch), DataLoader(nets.Images(7, seed=5), batch)],
    }


def dictionary(replicas: int) -> dict[str, Any]:
    batch = 8 // replicas
    parts = {"a": DataLoader(nets.Images(16), batch // 2), "b": DataLoader(nets.Images(24, seed=5), batch // 2)}
    return {"train_dataloaders": CombinedLoader(parts, "max_size_cycle")}


def balanced(replicas: int) -> dict[str, Any]:
    """A batch sampler of the user's own: with D replicas, D of its batches are one batch of one process."""
    sampler = BatchSampler(SequentialSampler(range(16)), 8 // replicas, drop_last=False)
    return {"train_dataloaders": DataLoader(nets.Images(16), batch_sampler=BySampler(sampler))}


class BySampler:
    """Not a `BatchSampler`, so its batches stay whole."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def with_replacement(replicas: int) -> dict[str, Any]:
    images = nets.Images(24)
    sampler = RandomSampler(images, replacement=True, num_samples=16)
    return {"train_dataloaders": DataLoader(images, 8 // replicas, sampler=sampler)}


def own_loaders(replicas: int) -> dict[str, Any]:
    return {}


def case(
    make_loaders: Callable[[int], dict[str, Any]] | None = None, module: Any = nets.Classifier, **more: Any
) -> Case:
    return Case(module=module, train=nets.images40, val=nets.images12, loaders=make_loaders, trainer=more)


SAME_DATA = {
    "epochs of shuffled data": case(shuffled, max_epochs=2),
    "several loaders": case(several_val_sets, SeveralSets),
    "combined loader": case(dictionary, SeveralSets),
    "batch sampler": case(balanced),
    "sampler with replacement": case(with_replacement),
    "reloaded": case(own_loaders, ReloadedEachEpoch, max_epochs=3, reload_dataloaders_every_n_epochs=1),
    "limited": case(limit_train_batches=3, limit_val_batches=0.5),
    "loss over all replicas": case(module=GathersOutputs),
    "overfit": case(overfit_batches=2, max_epochs=2),
}


@pytest.mark.case("C12")
def test_loaders_bring_what_they_bring_to_one_process() -> None:
    records = fit_several_on_ranks(list(SAME_DATA.values()), GRID)
    for name, record in zip(SAME_DATA, records, strict=True):
        try:
            assert_same(record, fit_alone(SAME_DATA[name]))
        except AssertionError as error:
            error.add_note(f"with loader: {name}")
            raise


def stream(replicas: int) -> dict[str, Any]:
    return {"train_dataloaders": DataLoader(Stream(20), 8), "val_dataloaders": DataLoader(Stream(6), None)}


class Batches:
    """No `DataLoader`, and without a length."""

    def __iter__(self) -> Iterator[Any]:
        images = nets.Images(16)
        yield images.images[:8], images.labels[:8]
        yield images.images[8:], images.labels[8:]


def batches(replicas: int) -> dict[str, Any]:
    return {"train_dataloaders": Batches()}


def rich_batches(replicas: int) -> dict[str, Any]:
    return {"train_dataloaders": DataLoader(Described(20), 8, collate_fn=list)}


class Described(nets.Images):
    """Samples that are more than tensors."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return {"image": image, "label": label, "name": f"sample {index}", "mask": None, "sizes": (index, 1.5)}


class ReadsNames(nets.Classifier):
    """Trains on lists of described samples, and validates on single ones."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert [sample["name"] for sample in batch] == [f"sample {sample['sizes'][0]}" for sample in batch]
        assert all(sample["mask"] is None for sample in batch)
        images = torch.stack([sample["image"] for sample in batch])
        return super().training_step((images, torch.stack([sample["label"] for sample in batch])), batch_idx)


class SingleSamples(nets.Classifier):
    """Validates sample by sample, without a batch dimension in the data."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        image, label = batch
        super().validation_step((image.unsqueeze(0), label.unsqueeze(0)), batch_idx)


class Data(pl.LightningDataModule):
    """Counts its hooks, and has a state of its own in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def setup(self, stage: str) -> None:
        self.images = nets.Images(16)

    def train_dataloader(self) -> Any:
        replicas = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {}).get("num_replicas", 1)
        return DataLoader(self.images, 8 // replicas, shuffle=True)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.moved += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"moved": self.moved}


def data_module(replicas: int) -> dict[str, Any]:
    return {"datamodule": Data()}


SAME_DATA_IN_A_REPLICA = {
    "stream": case(stream, SingleSamples, max_epochs=2),
    "batches": case(batches),
    "described samples": case(rich_batches, ReadsNames),
    "data module": case(data_module, max_epochs=2),
}


def test_any_iterable_can_be_mirrored_inside_a_replica() -> None:
    records = fit_several_on_ranks(list(SAME_DATA_IN_A_REPLICA.values()), Layout(2, 1))
    for name, record in zip(SAME_DATA_IN_A_REPLICA, records, strict=True):
        oracle = fit_alone(SAME_DATA_IN_A_REPLICA[name])
        assert_same(record, oracle)
        assert record.checkpoint.keys() == oracle.checkpoint.keys(), name
    assert records[-1].checkpoint["Data"] == {"moved": 4}


@pytest.mark.case("C26")
def test_case_c26_two_replicas_of_four_equal_one_of_eight() -> None:
    cases = [
        case(),
        Case(module=normalised, train=nets.images40, val=nets.images12, trainer={"sync_batchnorm": True}),
    ]
    oracles = [fit_alone(case) for case in cases]
    for layout in (Layout(1, 2), Layout(2, 2, {"num_microbatches": 1})):
        for record, oracle in zip(fit_several_on_ranks(cases, layout), oracles, strict=True):
            assert_same(record, oracle)


def normalised() -> nets.Classifier:
    return nets.Classifier(nets.plain(norm=True))


@pytest.mark.case("C36")
def test_case_c36_a_replica_that_has_fewer_batches_ends_the_epoch() -> None:
    results = run_ranks(4, _fit_unequal, timeout=30)
    assert [steps for steps, _ in results] == [3, 3, 3, 3]
    # Only the loading rank of replica 0 warns, once.
    assert [len(warned) for _, warned in results] == [1, 0, 0, 0]
    assert "Replica 1 ran out of data after 3 batches" in results[0][1][0]


def _fit_unequal(rank: int, world: int) -> Any:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(case(), make_strategy(GRID), world, "", Record())
        train = DataLoader(Stream(20, stop=20 if rank < 2 else 12), 4)
        trainer.fit(nets.Classifier(), train, DataLoader(Stream(8 if rank < 2 else 4), 4))
    return trainer.global_step, [str(w.message) for w in caught if "ran out of data" in str(w.message)]


# ---- counted once ----------------------------------------------------------------------------------------------------


class CountsInCallback(pl.Callback):
    """Has a metric of its own, outside of the module."""

    def __init__(self) -> None:
        from torchmetrics import SumMetric

        self.count = SumMetric()
        self.gathered: Any = None

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *args: Any) -> None:
        self.count.update(len(batch[0]))

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("count in callback", self.count.compute())
        self.count.reset()
        self.gathered = pl_module.all_gather(torch.tensor(trainer.global_rank))


class Counting(nets.Classifier):
    """Notes which samples it sees, and scores them with metrics."""

    def __init__(self) -> None:
        from torchmetrics import MeanMetric, SumMetric
        from torchmetrics.classification import MulticlassAccuracy

        super().__init__()
        self.accuracy = MulticlassAccuracy(num_classes=4)
        self.count = SumMetric()
        self.confidence = MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        outputs = self(images)
        self.accuracy(outputs, labels)
        self.count(len(labels))
        self.confidence(outputs.softmax(dim=1).max(dim=1).values)
        self.log("accuracy", self.accuracy)
        self.log("count", self.count)
        self.log("confidence", self.confidence)
        self.log("loss", self._loss(outputs, labels), sync_dist=True, batch_size=len(labels))

    test_step = validation_step


@pytest.mark.case("C39")
def test_case_c39_each_sample_of_validation_and_test_counts_once() -> None:
    expected = _evaluate(None, 1)
    assert [values["count"] for values in expected] == [7, 7]
    assert expected[0]["count in callback"] == 7
    for rank, (values, gathered) in enumerate(run_ranks(4, _evaluate_rank)):
        assert values == [pytest.approx(run, rel=1e-6) for run in expected]
        assert gathered == [rank % 2, rank % 2 + 2], "the ranks of the same stage"


def _evaluate_rank(rank: int, world: int) -> Any:
    counter = CountsInCallback()
    return _evaluate(make_strategy(GRID), 2, counter), counter.gathered.tolist()


def _evaluate(strategy: Any, replicas: int, counter: Any = None) -> list[dict[str, float]]:
    pl.seed_everything(1, verbose=False)
    module = Counting()
    trainer = make_trainer(case(), strategy, 2 * replicas if replicas > 1 else 1, "", Record())
    trainer.callbacks.append(counter or CountsInCallback())
    seven = DataLoader(nets.Images(7), 4 // replicas)
    validated = trainer.validate(module, seven, verbose=False)
    tested = trainer.test(module, seven, verbose=False)
    return [dict(validated[0]), dict(tested[0])]


@pytest.mark.case("C48")
def test_case_c48_a_stream_is_shared_out_or_a_warning_says_that_it_is_not() -> None:
    results = run_ranks(4, _train_on_stream)
    for rank, (seen, warned) in enumerate(results):
        partner = results[rank ^ 1]
        assert seen == partner[0], "ranks of one replica see the same samples"
        assert bool(warned) == (rank == 0), "said once, on the rank that loads"
    whole, shared = zip(results[0][0], results[2][0], strict=True)
    assert whole[0] == whole[1] == list(range(8))
    assert sorted(shared[0] + shared[1]) == list(range(8))
    assert "ShardedIterable" in results[0][1][0]


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(8))


class NotesSamples(nets.Classifier):
    """Its batches are numbers of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.extra += batch.tolist()
        images = nets.Images(8)
        picked = [images[i] for i in batch.tolist()]
        return super().training_step(
            (torch.stack([x for x, _ in picked]), torch.stack([y for _, y in picked])), batch_idx
        )


def _train_on_stream(rank: int, world: int) -> Any:
    import warnings

    seen = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for stream in (Numbers(), ShardedIterable(range(8))):
            module = NotesSamples()
            make_trainer(case(), make_strategy(GRID), world, "", Record()).fit(module, DataLoader(stream, 2))
            seen.append(module.extra)
    return seen, [str(w.message) for w in caught if "can't be divided among" in str(w.message)]


# ---- at random -------------------------------------------------------------------------------------------------------


class Noted(nets.Classifier):
    """Notes what it draws in each step from every generator, and the random numbers that come with the data."""

    def __init__(self) -> None:
        network = nets.plain()
        network.insert(4, torch.nn.Dropout(0.2))
        super().__init__(network)
        self.extra: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        *inputs, drawn = batch
        self.extra.append([*torch.randn(1).tolist(), random.random(), float(np.random.rand()), *drawn.tolist()])
        return super().training_step(inputs, batch_idx)


class Augmented(nets.Images):
    """Adds noise of its own in the loader."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        noise = torch.rand(())
        return image + noise, label, noise


@pytest.mark.case("C33")
def test_case_c33_replicas_draw_differently_and_stages_alike() -> None:
    by_rank = run_ranks(4, _draw)
    assert by_rank[0] == by_rank[1]
    assert by_rank[2] == by_rank[3]
    drawn = [value for rank in (0, 2) for step in by_rank[rank] for value in step]
    assert len(set(drawn)) == len(drawn), "no value comes twice: in no step, epoch or replica"


def _draw(rank: int, world: int) -> list[list[float]]:
    # Whatever the user seeded, or did not.
    pl.seed_everything(1, workers=True, verbose=False)
    torch.manual_seed(rank)
    module = Noted()
    trainer = make_trainer(case(max_epochs=2), make_strategy(GRID), world, "", Record())
    trainer.fit(module, DataLoader(Augmented(12), 4, num_workers=1, multiprocessing_context="fork"))
    return module.extra


class Mixed(nets.Classifier):
    """Mixes samples before the step, and once more in it."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        images, labels = batch
        flip = torch.rand(len(images)) < 0.5
        return torch.where(flip.view(-1, 1, 1, 1), images.flip(3), images), labels

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        order = torch.randperm(len(images))
        share = np.random.beta(1.0, 1.0)
        outputs = self.model(share * images + (1 - share) * images[order])
        loss = share * self._loss(outputs, labels) + (1 - share) * self._loss(outputs, labels[order])
        self.log("train_loss", loss)
        return loss


@pytest.mark.case("C34")
def test_case_c34_mixup_mixes_inputs_and_labels_alike_on_all_stages() -> None:
    mixed = Case(module=Mixed, train=nets.images40, trainer={"max_epochs": 2}, shuffle=True)
    assert_same(fit_on_ranks(mixed, Layout(2, 1)), fit_alone(mixed))


# ---- logged differently ----------------------------------------------------------------------------------------------


class LogsOnOneRank(nets.Classifier):
    """Logs a key on rank 0 only, before or after what all ranks log."""

    def __init__(self, *, sync: bool, first: bool = False) -> None:
        super().__init__()
        self.sync = sync
        self.first = first

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(batch[0]).square().mean()
        if self.global_rank == 0 and self.first:
            self.log("extra", 3.0, sync_dist=self.sync)
        self.log("train_loss", loss, sync_dist=True)
        if self.global_rank == 0 and not self.first:
            self.log("extra", 3.0, sync_dist=self.sync)
        return loss


@pytest.mark.case("C37")
def test_case_c37_a_key_that_one_replica_does_not_log_is_named() -> None:
    for before, after in run_ranks(2, _log_on_one_rank):
        assert "replica 0 reduces 'extra' (mean, shape ()); replica 1 reduces 'train_loss' (mean, shape ())" in before
        assert "replica 0 reduces 'extra' (mean, shape ()); replica 1 averages gradients" in after
        assert "log a key on every rank, or with sync_dist=False and rank_zero_only=True" in after


def _log_on_one_rank(rank: int, world: int) -> list[str]:
    own = case(limit_train_batches=2)
    # Not reduced: fine, and the value is the one that was logged. Within one replica nothing is reduced either.
    for layout, sync in ((Layout(1, 2), False), (Layout(2, 1), True)):
        trainer = make_trainer(own, make_strategy(layout), world, "", Record())
        trainer.fit(LogsOnOneRank(sync=sync), loaders(own, layout.data)["train_dataloaders"])
        assert trainer.callback_metrics.get("extra") == (3.0 if rank == 0 else None)
    errors = []
    for first in (True, False):
        trainer = make_trainer(own, make_strategy(Layout(1, 2)), world, "", Record())
        try:
            trainer.fit(LogsOnOneRank(sync=True, first=first), loaders(own, 2)["train_dataloaders"])
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_the_data_set_is_read_where_it_is_loaded_and_its_errors_reach_all_ranks() -> None:
    assert run_ranks(2, _read_data) == [(True, "sample 6 is broken"), (False, "sample 6 is broken")]


class Watched(Dataset[Any]):
    def __init__(self) -> None:
        self.read = False
        self.images = nets.Images(8)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.read = True
        return self.images[index]


class Broken(Watched):
    def __getitem__(self, index: int) -> Any:
        if index == 6:
            raise OSError("sample 6 is broken")
        return super().__getitem__(index)


def _read_data(rank: int, world: int) -> Any:
    data = Watched()
    make_trainer(case(), make_strategy(Layout(2, 1)), world, "", Record()).fit(nets.Classifier(), DataLoader(data, 4))
    trainer = make_trainer(case(), make_strategy(Layout(2, 1)), world, "", Record())
    try:
        trainer.fit(nets.Classifier(), DataLoader(Broken(), 4))
    except OSError as error:
        return data.read, str(error)
