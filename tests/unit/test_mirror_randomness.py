"""Generator states that are compared, carried over and kept in checkpoints."""

import io
import random

import numpy as np
import pytest
import torch

from lightning_cnnpar.mesh import Mesh
from lightning_cnnpar.mirror.randomness import (
    apply_states,
    capture_randomness,
    changed_states,
    fingerprint,
    restore_randomness,
    share_randomness,
    states,
)

DRAWS = {
    "python": random.random,
    "numpy": np.random.rand,
    # Two numbers are made at a time: the second call only empties a cache.
    "numpy normal": np.random.randn,
    "torch": lambda: torch.rand(1).item(),
}


def _draw_all():
    return [draw() for draw in DRAWS.values()]


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("draws_before", [0, 1])
def test_a_draw_from_any_generator_is_seen_and_carried(name, draws_before):
    for _ in range(draws_before):
        DRAWS[name]()
    before, mark = states(), fingerprint()
    DRAWS[name]()
    changed = changed_states(before)
    assert changed
    assert fingerprint() != mark
    expected = _draw_all()
    # Another rank, which hasn't drawn.
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])
    assert fingerprint() == mark
    apply_states(changed)
    assert _draw_all() == expected


def test_no_draw_is_nothing_to_carry():
    before = states()
    assert changed_states(before) == b""
    apply_states(b"")
    assert changed_states(before) == b""


def test_captured_states_are_plain():
    np.random.randn()
    random.gauss(0, 1)
    file = io.BytesIO()
    torch.save(capture_randomness(), file)
    expected = [*_draw_all(), random.gauss(0, 1)]
    file.seek(0)
    restore_randomness(torch.load(file, weights_only=True))
    assert [*_draw_all(), random.gauss(0, 1)] == expected


def test_one_process_keeps_its_randomness():
    mark = fingerprint()
    share_randomness(Mesh())
    assert fingerprint() == mark
