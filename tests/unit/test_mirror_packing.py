"""Batches taken apart and put together again in one process."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_cnnpar.mirror.packing import pack, unpack


def through(batch: Any) -> Any:
    packed = pack(batch)
    contents = iter(packed.contents)

    def fill(content: Tensor) -> None:
        content.copy_(next(contents))

    result = unpack(packed.structure, fill)
    assert next(contents, None) is None
    return result


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3, 4, 4)], ids=str)
def test_every_dtype_and_shape(dtype, shape):
    values = torch.rand(shape) * 5
    tensor = values.to(dtype)
    result = through(tensor)
    assert (result.dtype, result.shape, result.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert torch.equal(result.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def _layouts() -> dict[str, Tensor]:
    images = torch.rand(2, 3, 4, 5)
    return {
        "channels last": images.contiguous(memory_format=torch.channels_last),
        "permuted": images.permute(3, 1, 0, 2),
        "slice": images[:, 1],
        "slice of rows": images[1:],
        "step": images[:, ::2],
        "expanded": images[:1].expand(4, -1, -1, -1),
        "overlapping": torch.arange(10.0).as_strided((4, 3), (2, 1)),
        "conjugate": torch.view_as_complex(torch.rand(3, 2)).conj(),
        "negative": torch.view_as_complex(torch.rand(3, 2)).conj().imag,
    }


@pytest.mark.parametrize("name", _layouts())
def test_every_layout(name):
    tensor = _layouts()[name]
    result = through(tensor)
    assert torch.equal(result, tensor)
    if name in ("channels last", "permuted"):
        assert result.stride() == tensor.stride()
    # Only what is in the tensor travels, not the storage that it is a part of.
    assert sum(content.numel() for content in pack(tensor).contents) == tensor.numel() * tensor.element_size()


@dataclasses.dataclass
class Target:
    boxes: Tensor
    name: str
    extra: Any = None


class Sample(NamedTuple):
    image: Tensor
    target: Target


class Tagged(Tensor):
    """A subclass with something of its own."""


class Graph:
    """No container that anyone knows."""

    def __init__(self) -> None:
        self.nodes = torch.arange(6).reshape(2, 3)


def test_containers_and_objects():
    batch = {
        "samples": [Sample(torch.rand(2), Target(torch.rand(3, 4), "a", None)), 3, None, 1.5, "text", b"raw"],
        "empty": ([], (), {}, torch.empty(0, 4)),
        "array": np.arange(5, dtype=np.int16),
        ("tuple", 1): Graph(),
    }
    result = through(batch)
    sample = result["samples"][0]
    assert isinstance(sample, Sample)
    assert isinstance(sample.target, Target)
    assert torch.equal(sample.target.boxes, batch["samples"][0].target.boxes)
    assert result["samples"][1:] == [3, None, 1.5, "text", b"raw"]
    assert result["empty"][:3] == ([], (), {})
    assert result["empty"][3].shape == (0, 4)
    assert (result["array"] == batch["array"]).all()
    assert result["array"].dtype == np.int16
    assert torch.equal(result["tuple", 1].nodes, torch.arange(6).reshape(2, 3))
    assert list(result) == list(batch)


def test_a_tensor_that_occurs_twice_stays_one():
    tensor = torch.rand(3)
    first, (second, other) = through((tensor, [tensor, tensor.clone()]))
    assert first is second
    assert first is not other
    assert len(pack((tensor, [tensor])).contents) == 1


def test_sparse_quantized_and_subclasses():
    sparse = torch.eye(3).to_sparse()
    result = through(
        {"sparse": sparse, "tagged": torch.rand(2).as_subclass(Tagged), "meta": torch.empty(2, device="meta")}
    )
    assert torch.equal(result["sparse"].to_dense(), torch.eye(3))
    assert type(result["tagged"]) is Tagged
    assert result["meta"].is_meta


def test_packed_sequences():
    packed = pack_sequence([torch.arange(4.0), torch.arange(2.0)])
    result = through(packed)
    assert isinstance(result, PackedSequence)
    assert torch.equal(result.data, packed.data)


def test_the_need_for_gradients_travels():
    assert through(torch.ones(2, requires_grad=True)).requires_grad
    assert not through(torch.ones(2)).requires_grad


@pytest.mark.parametrize("send_in", [True, False])
def test_inference_mode(send_in):
    with torch.inference_mode(send_in):
        tensor = torch.ones(2)
    result = through(tensor)
    result.add_(1)
    assert result.tolist() == [2, 2]


def test_what_cannot_be_pickled_is_named():
    with pytest.raises(TypeError, match=r"goes from the rank that loads it.*lambda.*top of a module"):
        pack({"function": lambda: None})
