"""Compressed gradients in training: nearly the same losses, fewer bytes, and nothing lost over checkpoints."""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks import compression_accuracy
from lightning_cnnpar import ConfigurationError, HybridStrategy
from lightning_cnnpar.compression import Int8, OneBit, PowerSGD, TopK, auto
from tests import nets
from tests.fitting import QUIET
from tests.ranks import RankError, run_ranks

# Of plain Lightning, in this process.
pytestmark = pytest.mark.filterwarnings("ignore")

# An epoch of five steps: runs that go on from a checkpoint start at one.
SAMPLES = 80


class Toy(nets.Classifier):
    """Notes its losses."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.03, momentum=self.momentum)


def train(
    layout: tuple[int, int],
    folder: Path | str = "",
    ckpt: str | None = None,
    *,
    steps: int,
    momentum: float = 0.9,
    **options: Any,
) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    strategy = HybridStrategy(*layout, **options)
    arguments = QUIET
    if folder:
        saving = ModelCheckpoint(folder, f"{steps}", save_on_train_epoch_end=True, enable_version_counter=False)
        logger = CSVLogger(folder, version="run")
        arguments = QUIET | {"logger": logger, "callbacks": [saving], "enable_checkpointing": True}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=layout[0] * layout[1],
        strategy=strategy,
        max_epochs=steps * 16 // SAMPLES,
        precision="64-true",
        log_every_n_steps=1,
        **arguments,
    )
    module = Toy(momentum).double()
    trainer.fit(module, DataLoader(nets.Images(SAMPLES), 16 // layout[1]), ckpt_path=ckpt)
    return {"losses": module.losses, "state": dict(module.state_dict())}


CODECS = {
    "none": None,
    "onebit": OneBit(min_numel=1, block=64),
    "topk": TopK(ratio=0.1, min_numel=1),
    "powersgd": PowerSGD(rank=2, min_numel=1),
    "corrected": TopK(ratio=0.1, min_numel=1, ramp_steps=7, momentum=0.9),
}
# In the test of whole trainings; what takes long is left to the benchmark.
TRAINED: dict[str, Any] = {
    "dense": None,
    "int8": "int8",
    "onebit": OneBit(block=256),
    "auto": "auto",
    "schedule": {0: "int4", 40: {"*.3.weight": "onebit", "*": "int2"}},
}


def _digits(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found = {}
    for name, compression in TRAINED.items():
        pl.seed_everything(3, verbose=False)
        train_set, _, _ = compression_accuracy.data()
        strategy, module = HybridStrategy(1, 2, compression=compression), compression_accuracy.Digits(10)
        noted = compression_accuracy.Sent()
        logger = CSVLogger(folder, name="", version=name)
        arguments = QUIET | {"logger": logger, "callbacks": [noted]}
        trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=10, **arguments)
        trainer.fit(module, DataLoader(train_set, 32, shuffle=True))
        found[name] = {"loss": module.losses[-1], "state": dict(module.state_dict()), "ratio": noted.ratio}
    return found


@pytest.mark.case("C57")
def test_case_c57_compressed_training_reaches_the_loss_of_plain_gradients(tmp_path: Path) -> None:
    results = run_ranks(2, _digits, tmp_path, timeout=110)
    dense = sum(result["dense"]["loss"] for result in results)
    for name in TRAINED:
        first, second = (result[name] for result in results)
        assert all(torch.equal(first["state"][key], second["state"][key]) for key in first["state"]), name
        assert first["loss"] + second["loss"] < 1.05 * dense + 0.02, (name, first["loss"] + second["loss"], dense)
    # The first convolution, biases and normalisation travel as they are.
    ratios = [results[0][name]["ratio"] for name in ("dense", "int8", "onebit", "schedule")]
    assert ratios == pytest.approx([1.0, 0.27, 0.05, 0.08], abs=0.02)
    header = (tmp_path / "onebit" / "metrics.csv").read_text().splitlines()[0]
    for key in ("comm/ratio", "comm/payload_mib", "comm/wire_mib", "comm/encode_ms", "comm/residual_norm"):
        assert key in header


def _resume(rank: int, world: int, folder: Path, name: str, layout: tuple[int, int]) -> list[bool]:
    """Ten steps against five, a checkpoint, and five more."""
    options: dict[str, Any] = {"compression": CODECS[name], "momentum": 0.0 if name == "corrected" else 0.9}
    whole = train(layout, steps=10, **options)
    train(layout, folder=folder / name, steps=5, **options)
    resumed = train(layout, folder=folder / name, ckpt=f"{folder / name}/5.ckpt", steps=10, **options)
    return [torch.equal(whole["state"][key], resumed["state"][key]) for key in whole["state"]]


@pytest.mark.case("C56")
@pytest.mark.parametrize("layout", [(1, 2), (2, 2)])
def test_case_c56_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, layout: tuple[int, int]) -> None:
    names = ("topk", "corrected", "powersgd", "onebit") if layout == (1, 2) else ("topk",)
    for name in names:
        for same in run_ranks(layout[0] * layout[1], _resume, tmp_path, name, layout, timeout=100):
            assert all(same), name
    checkpoint = torch.load(tmp_path / "topk" / "5.ckpt", weights_only=True)
    own = checkpoint.pop("lightning_cnnpar")["compression"]
    trainable = {name: value for name, value in checkpoint["state_dict"].items() if value.dim() > 1}
    assert {name: rows.shape for name, rows in own["residuals"].items()} == {
        name: (3, *value.shape) for name, value in trainable.items()
    }
    assert own["step"] == 5


def _merge(rank: int, world: int, folder: Path) -> tuple[bool, list[str]]:
    told: list[str] = []
    logger = logging.getLogger("lightning_cnnpar.compression.residual")
    logger.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    run = train((1, 3), ckpt=f"{folder / 'topk'}/5.ckpt", steps=10, compression=CODECS["topk"])
    return all(bool(value.isfinite().all()) for value in run["state"].values()), told


def _write(rank: int, world: int, folder: Path) -> None:
    train((1, 2), folder=folder / "topk", steps=5, compression=CODECS["topk"])


@pytest.mark.case("C56")
def test_case_c56_residuals_are_merged_for_another_number_of_replicas(tmp_path: Path) -> None:
    run_ranks(2, _write, tmp_path)
    results = run_ranks(3, _merge, tmp_path)
    assert all(finite for finite, _ in results)
    assert [len(told) for _, told in results] == [1, 0, 0]
    assert "residuals of 2 replicas were merged for 3" in results[0][1][0]
    # Without compression, and in one process, the file is like any other.
    assert train((1, 1), ckpt=f"{tmp_path / 'topk'}/5.ckpt", steps=10)["losses"]


@pytest.mark.parametrize(
    ("compression", "message"),
    [
        ("int9", r"compression='int9' is unknown. Known: 'bf16', 'int8', 'int4', 'int2', 'onebit', 'topk', 'powersgd'"),
        (3, r"compression=3: give a name"),
        ({5: "int8"}, r"says nothing of the first steps"),
    ],
)
def test_what_can_not_work_is_refused(compression: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HybridStrategy(compression=compression)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(ratio=0.0), r"TopK\(ratio=0.0\): give a share in \(0, 1\]"),
        (lambda: TopK(ratio=1.5), r"TopK\(ratio=1.5\)"),
        (lambda: TopK(momentum=1), r"TopK\(momentum=1\): give a number in \[0, 1\)"),
        (lambda: TopK(ramp_steps=-1), r"TopK\(ramp_steps=-1\): give a whole number of at least 0"),
        (lambda: PowerSGD(rank=0), r"PowerSGD\(rank=0\): give a whole number of at least 1"),
        (lambda: Int8(block=12), r"Int8\(block=12\): give a multiple of 8"),
        (lambda: Int8(exclude="*.fc.*"), r"give a tuple of patterns"),
        (lambda: OneBit(warmup_steps=-1), r"OneBit\(warmup_steps=-1\)"),
    ],
)
def test_options_of_compressors_are_checked(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def _auto(rank: int, world: int, folder: Path) -> None:
    measured = auto.link_bandwidth

    def differs(group: Any, device: torch.device) -> float:
        measured(group, device)
        return 1e3 if rank % 2 else 1e12

    auto.link_bandwidth = differs
    train((2, 2), folder=folder, steps=5, compression="auto")


def test_all_stages_take_the_same_way_though_their_links_differ(tmp_path: Path) -> None:
    run_ranks(4, _auto, tmp_path, timeout=60)
    state = torch.load(tmp_path / "5.ckpt", weights_only=True)
    # Else only some ranks would meet to collect it.
    assert state["lightning_cnnpar"]["compression"]["step"] == 5


def _two_momenta(rank: int, world: int) -> None:
    train((1, 2), steps=5, compression=TopK(momentum=0.9))


def test_two_momenta_are_refused() -> None:
    with pytest.raises(RankError, match=r"TopK\(momentum=0.9\) gives .* SGD\(momentum=0.9\) would give them another"):
        run_ranks(2, _two_momenta, timeout=60)


def test_one_replica_has_nothing_to_compress() -> None:
    with pytest.warns(UserWarning, match=r"compression='int8' has nothing to compress: with data_parallel_size=1"):
        train((1, 1), steps=1, compression="int8")
