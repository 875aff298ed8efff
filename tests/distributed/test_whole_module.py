"""User code that needs the whole network while it is cut: exports, graphs, summaries, weights, calls outside of steps."""

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_cnnpar import HybridStrategy
from tests import nets
from tests.fitting import (
    Case,
    Layout,
    Record,
    assert_same_tensors,
    assert_same_tree,
    loaders,
    make_strategy,
    make_trainer,
)
from tests.ranks import run_ranks

# Of plain Lightning, in this process.
pytestmark = pytest.mark.filterwarnings("ignore")

PROBE = torch.linspace(-1, 1, 2 * 3 * 8 * 8, dtype=torch.float64).view(2, 3, 8, 8)


class Shown(nets.Classifier):
    """Has an example of its input, for summaries and graphs."""

    def __init__(self) -> None:
        super().__init__(nets.Residual())
        self.example_input_array = PROBE


class Exports(pl.Callback):
    """Looks at the whole module in the midst of training, and calls the network outside of steps."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            # Nothing is cut yet, so a call on one rank only needs no other.
            self.found["first call"] = pl_module(PROBE).detach()
        # A copy is nobody's stage.
        self.found["copy"] = copy.deepcopy(pl_module)(PROBE).detach()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 2:
            return
        with torch.no_grad():
            self.found["call"] = pl_module(PROBE)
        self.found["ids"] = [id(parameter) for parameter in pl_module.parameters()]
        with trainer.strategy.whole_module() as module, torch.no_grad():
            self.found["state"] = {name: tensor.clone() for name, tensor in module.state_dict().items()}
            self.found["norm"] = sum(float(parameter.norm()) for parameter in module.parameters())
            self.found["local call"] = module(PROBE)
            program = torch.export.export(module.model.eval(), (PROBE,))
            self.found["exported"] = program.module()(PROBE)
            self.found["scripted"] = torch.jit.trace(module.model, PROBE)(PROBE)
            module.train()
        after = [id(parameter) for parameter in pl_module.parameters()]
        self.found["kept"] = sum(one == two for one, two in zip(self.found.pop("ids"), after, strict=True))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.found["end norm"] = sum(float(parameter.detach().norm()) for parameter in pl_module.parameters())


class WholeAlone(Exports):
    """The same on one process, where the module is whole anyway."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            with torch.no_grad():
                self.found["state"] = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}
                self.found["call"] = pl_module(PROBE)
                self.found["norm"] = sum(float(parameter.norm()) for parameter in pl_module.parameters())


def _run(rank: int, world: int, layout: Layout | None, folder: Path) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    exports = WholeAlone() if layout is None else Exports()
    case = Case(module=Shown, train=nets.images40)
    strategy = None if layout is None else make_strategy(layout)
    module, record = Shown(), Record()
    logger = TensorBoardLogger(folder, name="graph", log_graph=True)
    trainer = make_trainer(case, strategy, world, str(folder), record, logger=logger)
    summary = ModelSummary(max_depth=2)
    trainer.callbacks += [exports, summary]
    trainer.fit(module, **loaders(case, 1 if layout is None else layout.data))
    trainer.save_checkpoint(Path(folder, "final.ckpt"))
    exports.found["final"] = dict(module.state_dict())
    exports.found["summary"] = str(pl.utilities.model_summary.summarize(module, 2))
    if strategy is not None:
        for strategy_copy in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
            assert isinstance(strategy_copy, HybridStrategy)
            assert strategy_copy.options == strategy.options
        copied = copy.deepcopy(module)
        pickled = pickle.loads(pickle.dumps(module.model))
        with torch.no_grad():
            assert torch.equal(copied(PROBE), pickled(PROBE))
    return exports.found


def test_the_module_is_whole_where_it_is_asked_for(tmp_path: Path) -> None:
    expected = _run(0, 1, None, tmp_path / "alone")
    results = run_ranks(4, _run, Layout(2, 2), tmp_path / "grid")
    for rank, found in enumerate(results):
        assert_same_tensors(found["state"], expected["state"], 1e-10)
        assert_same_tensors(found["final"], expected["final"], 1e-10)
        assert found["norm"] == pytest.approx(expected["norm"], abs=1e-9)
        assert found["end norm"] == pytest.approx(expected["end norm"], abs=1e-9)
        assert found["summary"] == expected["summary"]
        for key in ("call", "local call", "exported", "scripted"):
            assert torch.allclose(found[key], expected["call"], atol=1e-10), key
        # Parameters and placeholders are the same objects before and after, since optimizers refer to them.
        assert found["kept"] == len(expected["state"])
        assert ("first call" in found) == (rank == 0)
        assert torch.allclose(found["copy"], expected["first call"], atol=1e-10)
    assert torch.allclose(results[0]["first call"], expected["first call"], atol=1e-10)
    # What was looked at goes on training: the optimizer's state is complete.
    own, other = (torch.load(tmp_path / name / "final.ckpt", weights_only=True) for name in ("grid", "alone"))
    assert_same_tree(own["optimizer_states"], other["optimizer_states"])
    assert len(list((tmp_path / "grid").rglob("events.out.tfevents.*"))) == 1


class CallsOnOneRank(pl.Callback):
    """Calls the network outside of a step where the other ranks don't."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.global_rank == 0:
            pl_module(PROBE)


def test_a_call_on_one_rank_ends_in_an_error_that_names_it() -> None:
    caller, other = run_ranks(2, _call_on_one_rank, timeout=60)
    assert "in network 'Shown' in a call outside of a step, call 1 (train, grad, 2 samples" in caller
    assert "the limit is 5 s" in caller
    assert "runs on all ranks of its replica together" in caller
    # The other rank was waiting for its next batch; it says which rank failed first, and why.
    assert "rank 0 (replica 0, stage rank 0" in other or "limit is 5 s" in other, other


def _call_on_one_rank(rank: int, world: int) -> str:
    import datetime

    case = Case(module=Shown, train=nets.images40)
    strategy = make_strategy(Layout(2, 1), timeout=datetime.timedelta(seconds=5))
    trainer = make_trainer(case, strategy, world, "", Record())
    trainer.callbacks.append(CallsOnOneRank())
    try:
        trainer.fit(Shown(), **loaders(case, 1))
    except RuntimeError as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return "no error"
