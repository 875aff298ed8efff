import pytest
import torch

from lightning_cnnpar.pipeline import wire
from lightning_cnnpar.pipeline.outputs import JoinedOutputs, UnbatchedOutputError

CPU = torch.device("cpu")


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_large_outputs_arrive_where_they_belong(memory_format: torch.memory_format) -> None:
    whole = torch.randn(5, 8, 64, 64).to(memory_format=memory_format)
    outputs = JoinedOutputs(1, (3, 2), CPU)
    for m, part in enumerate(torch.split(whole, [3, 2])):
        meta = wire.describe(part)
        placed = outputs.expect(0, m, meta)
        assert placed is not None
        tensor, block = placed
        block.copy_(wire.flat(part, meta))
        outputs.add(0, tensor)
    outputs.check()
    joined = outputs.join(0)
    assert torch.equal(joined, whole)
    assert joined.stride() == whole.stride()
    assert joined.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_small_outputs_are_sent_joined() -> None:
    outputs = JoinedOutputs(2, (1, 1), CPU)
    outputs.describe(0, wire.describe(torch.zeros(1, 10)))
    outputs.describe(1, wire.describe(torch.zeros(1, 100_000)))
    assert outputs.is_late(0)
    assert not outputs.is_late(1)
    assert outputs.late_meta(0).shape == (2, 10)
    single = JoinedOutputs(1, (8,), CPU)
    single.describe(0, wire.describe(torch.zeros(8, 10)))
    assert not single.is_late(0)


def test_microbatches_of_other_shapes_are_still_joined() -> None:
    """The last dimension differs between microbatches: a copy is made in the end, or an error as `torch.cat` gives."""
    outputs = JoinedOutputs(1, (2, 1), CPU)
    for m, part in enumerate([torch.zeros(2, 20_000), torch.zeros(1, 20_001)]):
        placed = outputs.expect(0, m, wire.describe(part))
        assert placed is not None
        outputs.add(0, placed[0])
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        outputs.join(0)


@pytest.mark.parametrize("shape", [(), (7, 10), (4,)])
def test_outputs_without_samples(shape: tuple[int, ...]) -> None:
    outputs = JoinedOutputs(1, (3, 2), CPU)
    for _ in range(2):
        outputs.describe(0, wire.describe(torch.zeros(shape)))
    with pytest.raises(UnbatchedOutputError, match="output 0 has shape"):
        outputs.check()
