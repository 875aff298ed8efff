"""The strategy names are known to Lightning without the package being imported, at next to no cost."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lightning_cnnpar_autoload as autoload

FAKE = "fake_lightning.strategies"
"""A stand-in for Lightning's module, so that most tests need no real one."""

REGISTRY = """
class Registry(dict):
    def register(self, name, strategy, description=None, override=False, **init_params):
        assert override or name not in self
        self[name] = {"strategy": strategy, "init_params": init_params}

StrategyRegistry = Registry(own={})
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The source of the stand-in, importable; nothing waits for it yet."""
    package = tmp_path / "fake_lightning"
    package.mkdir()
    (package / "__init__.py").touch()
    source = package / "strategies.py"
    source.write_text(REGISTRY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(autoload, "_FACTORIES", {FAKE: autoload._make})
    others = [finder for finder in sys.meta_path if not isinstance(finder, autoload._Finder)]
    monkeypatch.setattr(sys, "meta_path", others)
    yield source
    for name in [name for name in sys.modules if name.startswith("fake_lightning")]:
        del sys.modules[name]


def _registered(module: ModuleType) -> dict[str, Any]:
    registry: dict[str, Any] = dict(module.StrategyRegistry)
    assert "own" in registry
    return {name: entry["init_params"] for name, entry in registry.items() if name != "own"}


def test_names_are_registered_when_the_module_is_imported(fake: Path) -> None:
    autoload.install()
    assert _registered(importlib.import_module(FAKE)) == autoload.STRATEGIES


def test_names_are_registered_at_once_in_a_module_that_is_loaded(fake: Path) -> None:
    module = importlib.import_module(FAKE)
    assert _registered(module) == {}
    autoload.install()
    assert _registered(module) == autoload.STRATEGIES


def test_installing_and_registering_may_be_repeated(fake: Path) -> None:
    for _ in range(2):
        autoload.install()
    module = importlib.import_module(FAKE)
    autoload.register()
    assert _registered(module) == autoload.STRATEGIES
    assert sum(isinstance(finder, autoload._Finder) for finder in sys.meta_path) == 1


def test_the_module_keeps_its_own_loader(fake: Path) -> None:
    importlib.import_module(FAKE)
    expected = sys.modules.pop(FAKE).__spec__
    autoload.install()
    spec = importlib.import_module(FAKE).__spec__
    assert spec is not None
    assert expected is not None
    assert type(spec.loader) is type(expected.loader)
    assert vars(spec.loader) == vars(expected.loader)
    assert spec.origin == expected.origin


@pytest.mark.parametrize("source", ["", "StrategyRegistry = None", "StrategyRegistry = object()"])
def test_a_lightning_of_another_shape_is_left_alone(fake: Path, source: str) -> None:
    fake.write_text(source)
    autoload.install()
    importlib.import_module(FAKE)
    autoload.install()


def test_an_error_of_the_module_itself_comes_through_and_a_second_import_works(fake: Path) -> None:
    fake.write_text("raise RuntimeError('broken installation')")
    autoload.install()
    with pytest.raises(RuntimeError, match="broken installation"):
        importlib.import_module(FAKE)
    fake.write_text(REGISTRY + "\n")
    importlib.invalidate_caches()
    assert _registered(importlib.import_module(FAKE)) == autoload.STRATEGIES


def test_a_module_that_is_not_there_stays_an_import_error(fake: Path) -> None:
    fake.unlink()
    autoload.install()
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match=FAKE):
            importlib.import_module(FAKE)


def _run(code: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True, timeout=100
    ).stdout


def test_importing_torch_installs_the_finder_and_nothing_else() -> None:
    code = "import torch, sys; print(*sys.modules); print(*(type(finder).__module__ for finder in sys.meta_path))"
    modules, finders = _run(code).splitlines()
    assert "lightning_cnnpar_autoload" in finders.split()
    assert not {"lightning", "pytorch_lightning", "lightning_cnnpar"} & set(modules.split())


def test_the_finder_itself_imports_little() -> None:
    code = "import sys; before = {*sys.modules}; import lightning_cnnpar_autoload; print(*({*sys.modules} - before))"
    loaded = {name.partition(".")[0] for name in _run(code).split()} - {"lightning_cnnpar_autoload"}
    assert loaded <= sys.stdlib_module_names
    assert len(loaded) < 20


def test_torch_can_be_told_to_leave_it_out() -> None:
    code = "import torch, sys; print('lightning_cnnpar_autoload' in sys.modules)"
    assert _run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False\n"


def test_lightning_knows_the_names() -> None:
    code = """
import sys
from lightning.pytorch.strategies import StrategyRegistry
print(*(name for name in StrategyRegistry if "cnnpar" in name), "lightning_cnnpar" in sys.modules)
import pytorch_lightning
try:
    pytorch_lightning.Trainer(strategy="cnnpar_hybrid", accelerator="cpu")
except TypeError as error:
    print(error)
"""
    names, error = _run(code).splitlines()
    assert names.split() == [*autoload.STRATEGIES, "False"]
    assert "from `lightning.pytorch`" in error
