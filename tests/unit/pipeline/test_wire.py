import pytest
import torch
from torch import Tensor

from lightning_cnnpar.pipeline import wire

TENSORS = {
    "contiguous": torch.randn(2, 3, 4, 5),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last, 1x1": torch.randn(2, 3, 1, 1).to(memory_format=torch.channels_last),
    "channels_last_3d": torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "slice of channels": torch.randn(2, 6, 4, 5)[:, 1:4],
    "slice of channels_last": torch.randn(2, 6, 4, 5).to(memory_format=torch.channels_last)[:, 1:4],
    "transposed": torch.randn(3, 4).t(),
    "expanded": torch.randn(1, 3, 1).expand(2, 3, 4),
    "empty": torch.randn(0, 3),
    "scalar": torch.randn(()),
    "bool": torch.rand(5) > 0.5,
    "int": torch.arange(6).view(2, 3)[:, ::2],
}


def _send(tensor: Tensor) -> Tensor:
    meta = wire.describe(tensor)
    block = wire.flat(tensor, meta)
    assert block.dim() == 1
    assert block.is_contiguous()
    received, memory = wire.empty(meta, meta.dtype, torch.device("cpu"))
    memory.copy_(block)
    return received


@pytest.mark.parametrize("name", TENSORS)
def test_values_survive(name: str) -> None:
    torch.testing.assert_close(_send(TENSORS[name]), TENSORS[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", ["contiguous", "channels_last", "channels_last, 1x1", "channels_last_3d", "transposed"]
)
def test_dense_tensors_keep_their_strides_and_are_not_copied(name: str) -> None:
    tensor = TENSORS[name]
    assert _send(tensor).stride() == tensor.stride()
    assert wire.flat(tensor, wire.describe(tensor)).data_ptr() == tensor.data_ptr()


@pytest.mark.case("C59")
def test_slices_of_channels_last_come_out_channels_last() -> None:
    assert _send(TENSORS["slice of channels_last"]).is_contiguous(memory_format=torch.channels_last)


def test_gradients_take_the_layout_of_the_value() -> None:
    meta = wire.describe(TENSORS["channels_last"])
    gradient = torch.randn(2, 3, 4, 5)
    received, memory = wire.empty(meta, meta.dtype, torch.device("cpu"))
    memory.copy_(wire.flat(gradient, meta))
    torch.testing.assert_close(received, gradient, rtol=0, atol=0)
    assert received.is_contiguous(memory_format=torch.channels_last)


def test_narrower_on_the_wire() -> None:
    tensor = torch.randn(4, 4)
    block = wire.flat(tensor, wire.describe(tensor), torch.bfloat16)
    assert block.dtype == torch.bfloat16


def test_descriptions_are_equal_when_the_tensors_are_alike() -> None:
    first, second = torch.randn(2, 3), torch.randn(2, 3)
    assert wire.describe(first) == wire.describe(second)
    assert wire.describe(first) != wire.describe(second.requires_grad_())
    assert wire.describe(first) != wire.describe(first.t())
