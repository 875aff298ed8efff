"""What the replicas train on is what one process trains on, whichever loader brings it."""

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from tests import nets
from tests.fitting import (
    Case,
    Layout,
    Record,
    assert_same,
    fit_alone,
    fit_several_on_ranks,
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
