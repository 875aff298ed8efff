import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_cnnpar.pipeline.batches import cut_batch, find_size


class Pair(NamedTuple):
    image: Tensor
    label: Tensor


@dataclasses.dataclass
class Sample:
    image: Tensor
    name: str


T = torch.zeros
IMAGES = [T(3, 4, 4) for _ in range(4)]
BOXES = [{"boxes": T(i, 4)} for i in range(4)]


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (T(8, 3), 8),
        ([T(8, 3), T(8)], 8),
        ((T(8, 3), {"a": T(8), "scale": 2.0}), 8),
        (Pair(T(5, 1), T(5)), 5),
        (Sample(T(5, 1), "x"), 5),
        ((T(4, 3), ["a", "b", "c", "d"]), 4),
        ((IMAGES, BOXES), 4),
        (([T(8, 3), T(8, 3)], T(8)), 8),
        ([{"image": T(3, 4, 4)}, {"image": T(3, 5, 5)}], 2),
        ([T(8, 3), T(())], 8),
    ],
)
def test_the_size_is_found(batch: Any, size: int) -> None:
    assert find_size(batch) == (size, "")


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ((T(8, 3), T(4)), "4 and 8 entries"),
        (([T(8, 3), T(8, 3)], None), "no tensor with a batch dimension"),
        (([T(3, 4), T(3, 4), T(3, 4)], [{}, {}, {}]), "may or may not"),
        ((T(2, 3), [0.5, 0.5]), "may or may not"),
        ((T(2, 3), object()), "holds a object"),
        (3, "no tensor"),
    ],
)
def test_what_is_uncertain_is_not_cut(batch: Any, reason: str) -> None:
    size, why = find_size(batch)
    assert size is None
    assert reason in why
    cut = cut_batch(batch, 2)
    assert cut.parts == [batch]
    assert cut.reason == why


def test_parts_belong_together() -> None:
    images = torch.arange(8.0)[:, None]
    cut = cut_batch({"x": images, "pair": Pair(images + 1, images + 2), "names": list("abcdefgh"), "k": 3}, 3)
    assert cut.sizes == (3, 3, 2)
    assert torch.equal(cut.parts[1]["x"], images[3:6])
    assert torch.equal(cut.parts[2]["pair"].label, images[6:] + 2)
    assert cut.parts[2]["names"] == ["g", "h"]
    assert cut.parts[0]["k"] == 3


def test_per_sample_lists_are_cut() -> None:
    cut = cut_batch((IMAGES, BOXES), 2)
    assert [len(part[0]) for part in cut.parts] == [2, 2]
    assert cut.parts[1][1][0] is BOXES[2]


def test_a_small_batch_gives_fewer_parts() -> None:
    assert cut_batch([T(2, 1), T(2)], 4).sizes == (1, 1)
    assert cut_batch([T(1, 1), T(1)], 4).parts[0][0].shape == (1, 1)
