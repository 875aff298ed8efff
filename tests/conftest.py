"""Guards around every test: what a test leaves behind in its process must not reach the next one."""

import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _restore_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    # pytest's own variable says which phase of the test runs.
    before["PYTEST_CURRENT_TEST"] = os.environ.get("PYTEST_CURRENT_TEST", "")
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _restore_torch() -> Iterator[None]:
    threads, dtype, deterministic = torch.get_num_threads(), torch.get_default_dtype(), _deterministic()
    gradients, precision = torch.is_grad_enabled(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
    torch.set_grad_enabled(gradients)
    torch.set_float32_matmul_precision(precision)


@pytest.fixture(autouse=True)
def _end_process_group() -> Iterator[None]:
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _same_randomness() -> None:
    """Tests draw the same numbers alone, in any order and in any selection."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder, and skip those that need a device where there is none."""
    for item in items:
        for marker in ("distributed", "parity", "gpu"):
            if f"/tests/{marker}/" in item.path.as_posix():
                item.add_marker(marker)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
