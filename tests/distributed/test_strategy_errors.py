"""What can't work says so, with the values it saw and the way out; where nothing is wrong, nothing is said."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn

from tests import nets
from tests.fitting import Case, Layout, Record, loaders, make_strategy, make_trainer
from tests.ranks import RankError, run_ranks

# Of plain Lightning, in this process.
pytestmark = pytest.mark.filterwarnings("ignore")

CASE = Case(module=nets.Classifier, train=nets.images40)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.1)


class ReadsWeights(nets.Classifier):
    """A regulariser over all parameters, written by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 1e-4 * sum(p.norm() for p in self.parameters())


class ChoosesInputs(nets.Classifier):
    """Asks for the gradients of some parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.manual_backward(loss, inputs=list(self.model.parameters()))


class Branching(nn.Module):
    """Its forward depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nets.plain()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if x.sum() > 0:
            x = -x
        return self.head(x)


class TwoLayers(nn.Module):
    """Has two layers, and one place to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.conv2 = nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.conv(x).relu_()).mean(dim=(2, 3))


def _errors(rank: int, world: int) -> dict[str, str]:
    """Each mistake is made on all ranks, so they go on together."""
    mistakes: dict[str, tuple[Any, dict[str, Any]]] = {
        "lbfgs": (lambda: nets.Classifier(optimizer=lbfgs), {}),
        "weights": (ReadsWeights, {}),
        "inputs": (ChoosesInputs, {}),
        "untraceable": (lambda: nets.Classifier(Branching()), {"network": "model"}),
        "unknown network": (nets.Classifier, {"network": "backbone"}),
        "cut point": (nets.Classifier, {"cut_points": ["model.99"]}),
        "too many stages": (lambda: nets.Classifier(nn.Sequential(nn.Flatten(), OneBlock())), {}),
    }
    found = {}
    for name, (make, options) in mistakes.items():
        trainer = make_trainer(CASE, make_strategy(Layout(2, 1, options)), world, "", Record())
        try:
            trainer.fit(make(), **loaders(CASE, 1))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


class OneBlock(nn.Module):
    """Two layers that can't be parted, since the forward around them can't be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(192, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(-x if x.sum() > 0 else x)


def test_mistakes_are_named_with_the_way_out() -> None:
    for rank, errors in enumerate(run_ranks(2, _errors)):
        assert errors["lbfgs"].startswith("ConfigurationError: LBFGS calls its closure several times")
        assert "use pipeline_parallel_size=1" in errors["lbfgs"]
        foreign = ("model.6.weight", "model.0.weight")[rank]
        assert errors["weights"].startswith(f"ForeignTensorError: {foreign!r}"), errors["weights"]
        assert f"on rank {1 - rank} of the replica" in errors["weights"]
        assert "weight_decay" in errors["weights"]
        assert "whole_module()" in errors["weights"]
        assert errors["inputs"].startswith("ConfigurationError: backward(inputs=...) names 'model.0.weight'")
        assert "toggle_optimizer" in errors["inputs"]
        assert errors["untraceable"].startswith(
            "UntraceableError: The forward of 'model' (Branching) can't be cut in 2"
        )
        assert "test_strategy_errors.py" in errors["untraceable"]
        assert "if x.sum() > 0:" in errors["untraceable"]
        assert 'network="model.body"' in errors["untraceable"]
        assert "network='backbone' is not a submodule. There are: 'model'" in errors["unknown network"]
        assert "can start at 'model.99'" in errors["cut point"]
        assert "can be cut into 1 stages at most, 2 were asked for" in errors["too many stages"]


# ---- a rank fails ----------------------------------------------------------------------------------------------------


class FailsOnOneRank(nets.Classifier):
    """Raises in the fourth step on rank 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3 and self.global_rank == 1:
            raise ValueError("a mistake of the user's")
        return super().training_step(batch, batch_idx)


def _fail(rank: int, world: int, folder: Path) -> None:
    callbacks = [
        ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1),
        OnExceptionCheckpoint(folder, filename="on_exception"),
    ]
    trainer = make_trainer(CASE, make_strategy(Layout(2, 2)), world, str(folder), Record(), enable_checkpointing=True)
    trainer.callbacks = [*callbacks, *trainer.callbacks]
    trainer.fit(FailsOnOneRank(), **loaders(CASE, 2))


def test_a_failure_ends_all_ranks_at_once_and_leaves_the_last_good_file(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="a mistake of the user's") as caught:
        run_ranks(4, _fail, tmp_path, timeout=60)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)
    # All of them raised by themselves, and say what they raised it for.
    assert caught.value.errors.keys() == {0, 1, 2, 3}
    assert "raised on rank 1 (replica 0, stage rank 1)" in caught.value.errors[1]
    for rank in (0, 2, 3):
        assert "had not ended" not in caught.value.errors[rank]
        assert "stopped because rank 1 (replica 0, stage rank 1" in caught.value.errors[rank], caught.value.errors[rank]
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"], "no part files, no half checkpoint"
    checkpoint = torch.load(tmp_path / "step=3.ckpt", weights_only=True)
    alone = nets.Classifier().double()
    alone.load_state_dict(checkpoint["state_dict"])
    resumed = make_trainer(CASE, None, 1, str(tmp_path), Record())
    resumed.fit(alone, **loaders(CASE, 1), ckpt_path=tmp_path / "step=3.ckpt")
    assert resumed.global_step == 5
