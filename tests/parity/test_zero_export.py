"""With pieces: whole weights for export in the midst of a run, evaluation, a second run, and replicas that part."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cnnpar import HybridStrategy
from lightning_cnnpar.data_parallel import sharding
from tests import nets
from tests.fitting import QUIET
from tests.ranks import RankError, run_ranks


class Exporting(nets.Classifier):
    """Keeps whole weights after the second step, and what of them its own rank sees between steps."""

    def __init__(self) -> None:
        super().__init__(nets.Residual(norm=True, blocks=2), nets.adamw)
        self.whole: dict[str, Tensor] = {}
        self.held = 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.held = sum(p.numel() for p in self.parameters() if p.device.type != "meta")
            with self.trainer.strategy.whole_module() as module:
                self.whole = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=1)


def _export(rank: int, world: int, pipeline: int, zero: int) -> Any:
    sharding.SMALLEST_UNIT = 1
    torch.manual_seed(0)
    module = Exporting()
    total = sum(p.numel() for p in module.parameters())
    strategy = HybridStrategy(pipeline, world // pipeline, zero_stage=zero, num_microbatches=1)
    trainer = pl.Trainer(accelerator="cpu", devices=world, strategy=strategy, max_steps=4, **QUIET)
    loader = DataLoader(nets.Float32Images(32), 4)
    trainer.fit(module, loader, loader)
    assert all(type(p) is torch.nn.Parameter and p.device.type == "cpu" for p in module.parameters())
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    validated = trainer.validate(module, loader, verbose=False)[0]["val_loss"]
    predicted = trainer.predict(module, loader)
    return module.whole, state, validated, predicted, module.held / total


@pytest.mark.parametrize(("pipeline", "zero"), [(1, 1), (1, 3), (2, 2), (2, 3)])
def test_whole_weights_in_the_midst_and_at_the_end(pipeline: int, zero: int) -> None:
    world = 2 * pipeline
    plain = run_ranks(world, _export, pipeline, 0, timeout=100)
    cut = run_ranks(world, _export, pipeline, zero, timeout=100)
    for (whole, state, validated, predicted, held), expected in zip(cut, plain, strict=True):
        for name, tensor in expected[0].items():
            assert torch.allclose(whole[name].double(), tensor.double(), atol=1e-6), name
        for name, tensor in expected[1].items():
            assert torch.allclose(state[name].double(), tensor.double(), atol=1e-6), name
        assert validated == pytest.approx(expected[2], rel=1e-5)
        assert all(torch.equal(one, two) for one, two in zip(predicted, expected[3], strict=True))
        assert held < 0.75 * expected[4] if zero == 3 else held == expected[4]


class Parting(nets.Classifier):
    """One replica calls its network once more than the other."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == 1:
            self.model(batch[0])
        return super().training_step(batch, batch_idx)


def _part(rank: int, world: int) -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=world, strategy=HybridStrategy(1, 2, zero_stage=3), **QUIET)
    trainer.fit(Parting(optimizer=nets.adamw).float(), DataLoader(nets.Float32Images(32), 4))


def test_replicas_that_call_networks_at_different_points_are_told_so() -> None:
    with pytest.raises(RankError, match="replica 1 calls network 'model' in training_step, batch 2"):
        run_ranks(2, _part, timeout=60)


class Rows(nets.Classifier):
    """An optimizer that looks at whole matrices."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


def _refused(rank: int, world: int) -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=world, strategy=HybridStrategy(1, 2, zero_stage=1), **QUIET)
    trainer.fit(Rows().float(), DataLoader(nets.Float32Images(8), 4))


def test_an_optimizer_that_needs_whole_parameters_is_refused() -> None:
    with pytest.raises(RankError, match="Adafactor does not treat every element alike.*Use zero_stage=0"):
        run_ranks(2, _refused, timeout=60)
