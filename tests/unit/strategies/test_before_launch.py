"""What can be seen without ranks: a strategy that can't work says so before any process starts; names, copies, YAML."""

import copy
import pickle
import subprocess
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader

from lightning_cnnpar import ConfigurationError, HybridPrecision, HybridStrategy
from tests import nets
from tests.fitting import QUIET

# Of plain Lightning.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process was about to start")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def make_trainer(strategy: Any, devices: int = 4, **more: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, **QUIET, **more)


@pytest.mark.parametrize(
    ("sizes", "devices", "words"),
    [
        ((3, "auto"), 4, ["pipeline_parallel_size=3 does not divide the world", "starts 4 ranks", "Possible: 1, 2, 4"]),
        (("auto", 3), 4, ["data_parallel_size=3 does not divide the world", "Possible: 1, 2, 4"]),
        ((2, 4), 4, ["pipeline_parallel_size=2 x data_parallel_size=4 needs 8 ranks", "starts 4 ranks", "Change"]),
        ((2, 1), 4, ["needs 2 ranks", "starts 4 ranks"]),
    ],
)
def test_sizes_that_do_not_fit_the_world(sizes: Any, devices: int, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as error:
        make_trainer(HybridStrategy(*sizes), devices)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("start_method", ["popen", "spawn", "fork"])
def test_more_stages_than_layers(start_method: Any) -> None:
    module = nets.Classifier(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 4)))
    trainer = make_trainer(HybridStrategy(4, 1, start_method=start_method))
    with pytest.raises(ConfigurationError, match="Classifier has only 2 modules with parameters.*at most 2 stages"):
        trainer.fit(module, DataLoader(nets.Images(8), 4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "dualpipe"}, ["schedule='dualpipe' is unknown", "'gpipe'", "'zero_bubble'"]),
        ({"schedule": "1f1b", "stages_per_rank": 2}, ["stages_per_rank=2 needs", "'interleaved_1f1b'"]),
        ({"num_microbatches": 0}, ["num_microbatches=0", "at least 1", "'auto'"]),
        ({"balance": "speed"}, ["balance='speed' is unknown", "'flops'"]),
        ({"zero_stage": 4}, ["zero_stage=4 is unknown"]),
    ],
)
def test_options_that_do_not_exist(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as error:
        HybridStrategy(**options)
    for word in words:
        assert word in str(error.value)


def test_a_strategy_can_be_copied_and_pickled() -> None:
    strategy = HybridStrategy(2, 2, num_microbatches=3, precision_plugin=HybridPrecision("bf16-mixed"))
    make_trainer(strategy)
    for twin in (copy.deepcopy(strategy), copy.copy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert twin.options == strategy.options
        assert twin.precision_plugin.precision == "bf16-mixed"
        assert twin.parallel_devices == strategy.parallel_devices
        assert twin.mesh.world_size == 1


def test_saving_before_fit(tmp_path: Path) -> None:
    trainer = make_trainer(HybridStrategy(), 1)
    with pytest.raises(AttributeError, match="a model is attached"):  # as any Trainer says
        trainer.save_checkpoint(tmp_path / "none.ckpt")
    module = nets.Classifier()
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "early.ckpt")
    state = torch.load(tmp_path / "early.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())


CONFIG = """
trainer:
  accelerator: cpu
  devices: 4
  logger: false
  precision: bf16-mixed
  strategy:
    class_path: lightning_cnnpar.HybridStrategy
    init_args:
      pipeline_parallel_size: 2
      data_parallel_size: auto
      schedule: gpipe
      num_microbatches: 8
      cut_points: [model.4]
      balance: [2.0, 1.0]
      timeout: 0:00:30
      start_method: spawn
model:
  class_path: tests.nets.Classifier
"""


def test_the_command_line_interface_reads_every_option(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    arguments = ["--config", str(file), "--trainer.strategy.num_microbatches", "16"]
    cli = LightningCLI(
        run=False, args=arguments, save_config_callback=None, subclass_mode_model=True, model_class=pl.LightningModule
    )
    strategy = cli.trainer.strategy
    assert isinstance(strategy, HybridStrategy)
    options = strategy.options
    assert (options.pipeline_parallel_size, options.data_parallel_size) == (2, "auto")
    assert (options.num_microbatches, options.cut_points, options.balance) == (16, ("model.4",), [2.0, 1.0])
    assert isinstance(strategy.precision_plugin, HybridPrecision)
    assert strategy.precision_plugin.precision == "bf16-mixed"
    with pytest.raises(SystemExit):
        LightningCLI(
            run=False,
            args=["--config", str(file), "--trainer.strategy.schedule", "dualpipe"],
            model_class=nets.Classifier,
        )
