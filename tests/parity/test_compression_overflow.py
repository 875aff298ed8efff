"""Loss scaling and compression: a gradient that overflows on one rank is skipped by all, and residuals don't see it."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cnnpar import HybridPrecision, HybridStrategy
from lightning_cnnpar.compression import TopK
from lightning_cnnpar.compression.topk import largest
from tests import nets
from tests.fitting import QUIET
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

CODEC = TopK(ratio=0.2, min_numel=100)
STEPS, BATCH, OVERFLOW = 7, 2, 3
SCALE = 2.0**16


class Scaled(nets.Classifier):
    """The gradient of one weight is infinite in one step, on one rank. Notes what its own backward pass gives."""

    def __init__(self, where: str) -> None:
        torch.manual_seed(1)
        super().__init__(nets.Residual(blocks=2))
        self.at, self.where = -1, where
        self.scales: list[float] = []
        self.kept: list[dict[str, Tensor]] = []
        self.local: list[dict[str, Tensor]] = [{} for _ in range(STEPS)]
        for name, parameter in self.named_parameters():
            parameter.register_hook(partial(self._note, name))

    def _note(self, name: str, grad: Tensor) -> Tensor:
        if self.at == OVERFLOW and name == self.where and self.trainer.strategy.mesh.data_rank == 1:
            grad = grad * float("inf")
        self.local[self.at][name] = grad.detach().clone()
        return grad

    def _residuals(self) -> dict[str, Tensor]:
        residuals = self.trainer.strategy.compression_engine.residuals
        residuals.commit()
        return {name: value.clone() for name, value in residuals.worker.items()}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.at = batch_idx
        self.kept.append(self._residuals())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.scales.append(float(self.trainer.strategy.precision_plugin.scaler.get_scale()))


def _train(rank: int, world: int, layout: tuple[int, int], where: str) -> dict[str, Any]:
    module = Scaled(where)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=HybridStrategy(*layout, compression=CODEC, num_microbatches=1),
        plugins=[HybridPrecision("16-mixed", channels_last=None)],
        max_epochs=1,
        **QUIET,
    )
    trainer.fit(module, DataLoader(nets.Float32Images(STEPS * BATCH * 2), BATCH))
    return {"state": dict(module.state_dict()), "scales": module.scales, "kept": module.kept, "local": module.local}


def oracle(local: list[list[dict[str, Tensor]]]) -> dict[str, Tensor]:
    """What becomes of the replicas' own gradients in one process, without the step that overflows.

    Float16 rounds differently from process to process, which can change what is chosen: so gradients are taken as they
    were, and all that follows is done once more.
    """
    module = nets.Classifier(Scaled("model.stem.weight").model)
    parameters = dict(module.named_parameters())
    optimizer = module.configure_optimizers()
    left: dict[Any, Tensor] = {}
    for step in range(STEPS):
        scale = SCALE if step <= OVERFLOW else SCALE / 2
        if step == OVERFLOW:
            continue
        for name, value in parameters.items():
            value.grad = torch.zeros_like(value)
            for replica in range(2):
                share = local[replica][step][name].view(-1) / scale / 2
                if value.dim() > 1 and value.numel() >= CODEC.min_numel:
                    whole = left.get((replica, name), 0) + share
                    sent = largest(whole, CODEC.count(whole.numel()))
                    share = torch.zeros_like(whole)
                    share[sent] = whole[sent].bfloat16().float()
                    left[replica, name] = whole - share
                value.grad += share.view_as(value)
        optimizer.step()
    return dict(module.state_dict())


@pytest.mark.parametrize("layout", [(1, 2), (2, 2)])
@pytest.mark.parametrize("where", ["model.stem.weight", "model.head.weight"])
def test_a_step_that_overflows_on_one_rank_is_skipped_by_all(layout: tuple[int, int], where: str) -> None:
    results = run_ranks(layout[0] * layout[1], _train, layout, where, timeout=100)
    stages = layout[0]
    local = [
        [
            {name: g for stage in range(stages) for name, g in results[replica * stages + stage]["local"][step].items()}
            for step in range(STEPS)
        ]
        for replica in range(2)
    ]
    assert not local[1][OVERFLOW][where].isfinite().any()
    assert local[0][OVERFLOW][where].isfinite().all()
    expected = oracle(local)
    for rank, result in enumerate(results):
        assert result["scales"] == [SCALE] * OVERFLOW + [SCALE / 2] * (STEPS - OVERFLOW), rank
        before, after, later = (result["kept"][OVERFLOW + i] for i in range(3))
        assert before
        assert all(torch.equal(after[name], value) for name, value in before.items()), rank
        assert all(bool(value.any()) for value in before.values())
        assert not any(torch.equal(later[name], value) for name, value in before.items()), rank
        for name, value in expected.items():
            torch.testing.assert_close(
                result["state"][name], value, atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
            )
