"""Train the same module in one process and on several ranks, and compare everything that training leaves behind.

oracle = fit_alone(case)                    one process, batch of D x b, a plain Trainer
record = fit_on_ranks(case, Layout(2, 2))   P x D ranks, batch of b each, HybridStrategy
assert_same(record, oracle)                 every gradient of every step, parameter, buffer, logged value
"""

import dataclasses
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_cnnpar import HybridStrategy
from lightning_cnnpar.partition.foreign import is_foreign
from tests.ranks import run_ranks

TOLERANCE = 1e-10
# Arguments of a Trainer that shows and writes nothing.
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a run is laid out; `options` go to `HybridStrategy`."""

    pipeline: int = 1
    data: int = 1
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.pipeline * self.data


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained. The functions are defined at the top of a module, since ranks import them.

    Attributes:
        module: Makes the LightningModule.
        train: Makes the training set.
        val: Makes the validation set; `None` for none.
        batch: Samples of a global batch: D replicas take batch / D each.
        trainer: More arguments of the Trainer; values that are functions named `make_...` are called on each rank.
        seed: Of everything.
        shuffle: Whether the training loader shuffles.
        double: Train in float64.
        loaders: Makes the loaders for a number of replicas, in place of those from `train`, `val` and `batch`.
        options: More arguments of `HybridStrategy`, beside those of the layout.
        after: Called with the Trainer and the module when training is over, on every rank; its result is noted.
    """

    module: Callable[[], pl.LightningModule]
    train: Callable[[], Dataset[Any]]
    val: Callable[[], Dataset[Any]] | None = None
    batch: int = 8
    trainer: dict[str, Any] = dataclasses.field(default_factory=dict)
    callbacks: Callable[[], list[pl.Callback]] | None = None
    seed: int = 1
    shuffle: bool = False
    double: bool = True
    loaders: Callable[[int], dict[str, Any]] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    after: Callable[[pl.Trainer, pl.LightningModule], Any] | None = None


@dataclasses.dataclass
class Record:
    """What a run left behind. Gradients are those that the optimizer saw, by step.

    `extra` is the module's attribute of that name, and `after` what the function of the case returned; of a run on
    several ranks, lists with an entry for each rank. `warnings` are those of the first rank.
    """

    gradients: list[dict[str, Tensor]] = dataclasses.field(default_factory=list)
    state: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    logged: list[dict[str, float]] = dataclasses.field(default_factory=list)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    checkpoint: dict[str, Any] = dataclasses.field(default_factory=dict)
    extra: Any = None
    after: Any = None
    warnings: list[str] = dataclasses.field(default_factory=list)


class Recorder(pl.Callback):
    """Notes gradients before each optimizer step, after clipping, and logged values after it."""

    def __init__(self) -> None:
        self.record = Record()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.record.logged.append(values)


class _GradientTap:
    """Notes the gradients that an optimizer is stepped with."""

    def __init__(self, module: pl.LightningModule, record: Record) -> None:
        self._module = module
        self._record = record

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._record.gradients.append(
            {
                name: parameter.grad.detach().clone()
                for name, parameter in self._module.named_parameters()
                if id(parameter) in stepped and not is_foreign(parameter) and parameter.grad is not None
            }
        )


class TapGradients(pl.Callback):
    """Looks at gradients inside `optimizer.step`, when clipping is done."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for optimizer in trainer.optimizers:
            # With a closure, gradients exist only inside of `step`; it is the last thing that the closure wrapper runs.
            original = optimizer.step
            tap = _GradientTap(pl_module, self._record)
            optimizer.step = _tapped(original, optimizer, tap)


def _tapped(step: Callable[..., Any], optimizer: Any, tap: _GradientTap) -> Callable[..., Any]:
    def tapped(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if closure is None:
            tap(optimizer, (), {})
            return step(**kwargs)

        def closure_and_tap() -> Any:
            result = closure()
            tap(optimizer, (), {})
            return result

        return step(closure=closure_and_tap, **kwargs)

    tapped.__self__ = optimizer  # type: ignore[attr-defined]  # schedulers look for a bound method
    tapped.__func__ = type(optimizer).step  # type: ignore[attr-defined]
    return tapped


def fit_alone(case: Case) -> Record:
    """Train in this process with a plain Trainer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _fit(case, None)


def fit_on_ranks(case: Case, layout: Layout, timeout: float = 110) -> Record:
    """Train on P x D ranks. Gradients are merged over the stages, and must be equal on all replicas."""
    return fit_several_on_ranks([case], layout, timeout)[0]


def fit_several_on_ranks(cases: Sequence[Case], layout: Layout, timeout: float = 110) -> list[Record]:
    """Train one case after the other on the same ranks, each with a Trainer of its own."""
    by_rank: list[list[Record]] = run_ranks(layout.world, _fit_rank, list(cases), layout, timeout=timeout)
    return [_merge(list(records), layout) for records in zip(*by_rank, strict=True)]


def _join_pieces(records: list[Record], layout: Layout) -> None:
    """With ZeRO, the optimizer of each replica saw pieces of gradients: put them together, for all replicas alike."""
    for stage in range(layout.pipeline):
        replicas = records[stage :: layout.pipeline]
        for gradients in zip(*(record.gradients for record in replicas), strict=True):
            for name in gradients[0]:
                whole = torch.cat([pieces[name].flatten() for pieces in gradients])
                like = records[0].state[name]
                if whole.numel() == like.numel():
                    for pieces in gradients:
                        pieces[name] = whole.as_strided(like.shape, like.stride())


def _merge(records: list[Record], layout: Layout) -> Record:
    if layout.options.get("zero_stage") and layout.data > 1:
        _join_pieces(records, layout)
    for rank, record in enumerate(records):
        replica_zero = records[rank % layout.pipeline]
        assert len(record.gradients) == len(replica_zero.gradients)
        for step, (own, other) in enumerate(zip(record.gradients, replica_zero.gradients, strict=True)):
            assert own.keys() == other.keys()
            for name in own:
                assert torch.equal(own[name], other[name]), f"replicas differ in step {step}: {name}"
        assert_same_tensors(record.state, records[0].state, tolerance=0.0)
    merged = records[0]
    for record in records[1 : layout.pipeline]:
        for step, gradients in enumerate(record.gradients):
            merged.gradients[step].update(gradients)
    merged.extra = [record.extra for record in records]
    merged.after = [record.after for record in records]
    return merged


def assert_same(record: Record, oracle: Record, tolerance: float = TOLERANCE, gradients: bool = True) -> None:
    """Hold a run against one process, tensor by tensor."""
    if gradients:
        assert len(record.gradients) == len(oracle.gradients)
        for step, (own, other) in enumerate(zip(record.gradients, oracle.gradients, strict=True)):
            assert own.keys() == other.keys(), f"step {step}: {own.keys() ^ other.keys()}"
            for name in own:
                difference = float((own[name] - other[name]).abs().max())
                assert difference <= tolerance, f"step {step}, gradient of {name}: off by {difference:.3g}"
    assert_same_tensors(record.state, oracle.state, tolerance)
    assert len(record.logged) == len(oracle.logged)
    for step, (values, expected) in enumerate(zip(record.logged, oracle.logged, strict=True)):
        assert_same_values(values, expected, tolerance, f"step {step}")
    assert_same_values(record.metrics, oracle.metrics, tolerance, "end")


def assert_same_tensors(own: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    assert list(own) == list(other)
    for name in own:
        assert own[name].dtype == other[name].dtype, name
        difference = float((own[name].double() - other[name].double()).abs().max()) if own[name].numel() else 0.0
        assert difference <= tolerance, f"{name}: off by {difference:.3g}"


def assert_same_tree(own: Any, other: Any, where: str = "checkpoint", tolerance: float = TOLERANCE) -> None:
    """Hold nested containers against others: types, keys and their order, tensors with dtype and strides."""
    assert type(own) is type(other), where
    if isinstance(other, Tensor):
        assert (own.shape, own.dtype, own.stride()) == (other.shape, other.dtype, other.stride()), where
        assert torch.allclose(own, other, rtol=0, atol=tolerance), where
    elif isinstance(other, dict):
        assert list(own) == list(other), where
        for key in other:
            assert_same_tree(own[key], other[key], f"{where}[{key!r}]", tolerance)
    elif isinstance(other, (list, tuple)):
        assert len(own) == len(other), where
        for i, (one, two) in enumerate(zip(own, other, strict=True)):
            assert_same_tree(one, two, f"{where}[{i}]", tolerance)
    elif isinstance(other, float):
        assert own == other or abs(own - other) <= max(tolerance, 1e-6 * abs(other)), where
    else:
        assert own == other, where


def assert_same_values(own: dict[str, float], other: dict[str, float], tolerance: float, where: str) -> None:
    assert own.keys() == other.keys(), f"{where}: {own.keys() ^ other.keys()}"
    for name in own:
        # Lightning keeps logged values in float32.
        limit = max(tolerance, 1e-6 * abs(other[name]))
        assert abs(own[name] - other[name]) <= limit, f"{where}, {name}: {own[name]} against {other[name]}"


def make_trainer(case: Case, strategy: Any, world: int, folder: str, record: Record, **more: Any) -> pl.Trainer:
    """The Trainer of a case; quiet and small unless the case says otherwise."""
    arguments: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": world,
        **QUIET,
        "default_root_dir": folder,
        "precision": "64-true" if case.double else "32-true",
        "use_distributed_sampler": True,
    }
    if strategy is not None:
        arguments["strategy"] = strategy
    arguments.update(case.trainer)
    arguments.update(more)
    recorder = Recorder()
    recorder.record = record
    own = case.callbacks() if case.callbacks is not None else []
    return pl.Trainer(**arguments, callbacks=[*own, recorder, TapGradients(record)])


def loaders(case: Case, replicas: int) -> dict[str, Any]:
    """Loaders with the batch of one replica."""
    if case.loaders is not None:
        return case.loaders(replicas)
    batch = case.batch // replicas
    found: dict[str, Any] = {"train_dataloaders": DataLoader(case.train(), batch, shuffle=case.shuffle)}
    if case.val is not None:
        found["val_dataloaders"] = DataLoader(case.val(), batch)
    return found


def _fit_rank(rank: int, world: int, cases: list[Case], layout: Layout) -> list[Record]:
    return [_fit_noting_warnings(case, layout) for case in cases]


def _fit_noting_warnings(case: Case, layout: Layout) -> Record:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record = _fit(case, make_strategy(layout, **case.options), layout)
    record.warnings = [str(warning.message) for warning in caught]
    return record


def make_strategy(layout: Layout, **more: Any) -> HybridStrategy:
    """The strategy of a layout."""
    sizes = {"pipeline_parallel_size": layout.pipeline, "data_parallel_size": layout.data}
    return HybridStrategy(**{**sizes, **layout.options, **more})


def _fit(case: Case, strategy: Any, layout: Layout | None = None) -> Record:
    layout = layout or Layout()
    record = Record()
    pl.seed_everything(case.seed, verbose=False)
    module = case.module()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, strategy, layout.world, folder, record)
        trainer.fit(module, **loaders(case, layout.data))
        path = Path(folder, "last.ckpt")
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            record.checkpoint = torch.load(path, weights_only=False)
        record.state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        record.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        record.extra = getattr(module, "extra", None)
        if case.after is not None:
            record.after = case.after(trainer, module)
    return record
