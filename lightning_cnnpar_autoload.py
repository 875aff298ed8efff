"""Makes `Trainer(strategy="cnnpar_hybrid")` work without `import lightning_cnnpar`.

Lightning has no entry point for strategies, but torch has one for device backends, and Lightning imports torch:

    import torch ──► install() ──► a finder on `sys.meta_path` that waits for Lightning
    import lightning.pytorch ──► its strategies have been imported ──► the names are in its registry
    Trainer(strategy="cnnpar_hybrid") ──► the package is imported, the strategy is built

So a process that only imports torch pays for this small module and nothing else, and an error in here never reaches it.
`TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns the entry point off; then `import lightning_cnnpar` registers the names.
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "cnnpar_hybrid": {},
    "cnnpar_hybrid_spawn": {"start_method": "spawn"},
    "cnnpar_hybrid_fork": {"start_method": "fork"},
    "cnnpar_hybrid_zero1": {"zero_stage": 1},
    "cnnpar_hybrid_zero2": {"zero_stage": 2},
    "cnnpar_hybrid_zero3": {"zero_stage": 3},
}
"""The registered names, each with what it sets on `HybridStrategy`."""

_DESCRIPTION = "Pipeline stages x data-parallel replicas of a convolutional network"


def install() -> None:
    """Register the names now where Lightning is loaded, and later where it is not. Never raises; may be repeated."""
    try:
        register()
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    except Exception:
        # Whoever imports torch may not even want Lightning.
        return


def register() -> None:
    """Register the names in each Lightning tree that is loaded. May be repeated; a later call wins."""
    for name, factory in _FACTORIES.items():
        registry = getattr(sys.modules.get(name), "StrategyRegistry", None)
        if registry is None:
            continue
        for strategy, options in STRATEGIES.items():
            registry.register(strategy, factory, description=_DESCRIPTION, override=True, **options)


def _make(**options: Any) -> object:
    from lightning_cnnpar import HybridStrategy

    return HybridStrategy(**options)


def _refuse(**options: Any) -> object:
    raise TypeError(
        "The strategy `cnnpar_hybrid` belongs to `lightning.pytorch`, and this Trainer is from `pytorch_lightning`: the"
        " two packages have the same classes twice over and don't accept each other's. Import Trainer, LightningModule,"
        " callbacks and loggers from `lightning.pytorch`; nothing else changes."
    )


_FACTORIES: Mapping[str, Callable[..., object]] = {
    "lightning.pytorch.strategies": _make,
    "pytorch_lightning.strategies": _refuse,
}
"""The modules that hold a registry, and what makes a strategy for their Trainer."""


class _Finder:
    """Finds nothing itself: it lets the other finders answer, and has `register` run after the module's own code."""

    def __init__(self) -> None:
        self._asking: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _FACTORIES or name in self._asking:
            return None
        self._asking.add(name)
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None:
                _register_after(spec)
            return spec
        except Exception:
            return None
        finally:
            self._asking.discard(name)


def _register_after(spec: ModuleSpec) -> None:
    # The loader stays the one that the module would have had, so that its source and its resources are found as ever.
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        try:
            register()
        except Exception:
            return

    loader.exec_module = exec_module
