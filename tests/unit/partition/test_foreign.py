"""Placeholders keep structure and flags, never mix with real values, and say whose they are."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from lightning_cnnpar.partition.foreign import Foreign, ForeignTensorError, is_foreign
from lightning_cnnpar.partition.ownership import Ownership, release_foreign, replace_in_optimizer, restore_whole


def network() -> Any:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def cut(module: nn.Module, rank: int = 0) -> dict[int, Tensor]:
    """Leave the middle layer to rank 1."""
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    owners = {name: int(".1." in f".{name}") for name in names}
    return release_foreign(module, Ownership(rank, owners))


def test_placeholder_keeps_what_code_looks_at() -> None:
    net = network()
    net[1].weight.requires_grad_(False)
    cut(net)
    weight = net[1].weight
    assert isinstance(weight, nn.Parameter)
    assert is_foreign(weight)
    assert weight.is_leaf
    assert not weight.requires_grad
    assert weight.shape == (4,)
    assert weight.dtype == torch.float32
    assert weight.device.type == "meta"
    assert weight.grad is None
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in network().named_parameters()]
    assert repr(weight) == "Foreign('1.weight', shape=(4,), dtype=torch.float32, on rank 1)"


def test_own_tensors_stay_the_same_objects() -> None:
    net = network()
    before = net[0].weight
    cut(net)
    assert net[0].weight is before


def test_flags_can_be_set() -> None:
    net = network()
    cut(net)
    net.requires_grad_(False)
    assert not net[1].weight.requires_grad
    net.requires_grad_(True)
    assert net[1].weight.requires_grad


READS: dict[str, Callable[[Any], Any]] = {
    "sum of norms": lambda net: sum(p.norm() for p in net.parameters()),
    "loss plus penalty": lambda net: torch.ones(()) + net[1].weight.square().sum(),
    "item": lambda net: net[1].weight.sum().item(),
    "comparison": lambda net: bool((net[1].weight > 0).all()),
    "flattened": lambda net: nn.utils.parameters_to_vector(net.parameters()),
    "stacked": lambda net: torch.stack([p.norm() for p in net.parameters()]),
    "to numpy": lambda net: net[1].weight.detach().numpy(),
    "copied into a real tensor": lambda net: torch.zeros(4).copy_(net[1].weight),
    "called": lambda net: net(torch.randn(2, 3)),
    "backward": lambda net: net[1].weight.sum().backward(),
    "listwise": lambda net: torch._foreach_norm([p.detach() for p in net.parameters()]),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_reading_values_names_parameter_rank_and_way_out(read: Callable[[Any], Any]) -> None:
    net = network()
    cut(net)
    with pytest.raises(ForeignTensorError, match=r"'1\..*rank 1 of the replica.*whole_module"):
        read(net)


def test_saving_a_placeholder_is_refused(tmp_path: Any) -> None:
    net = network()
    cut(net)
    with pytest.raises(ForeignTensorError, match="can't be saved or sent"):
        torch.save(net.state_dict(), tmp_path / "weights.pt")


def test_foreign_values_stay_foreign() -> None:
    net = network()
    cut(net)
    mixed = net[1].weight * 0.9 + net[1].bias * 0.1
    assert is_foreign(mixed)
    assert is_foreign(torch.zeros_like(net[1].running_mean))
    assert is_foreign(copy.deepcopy(net)[1].weight)
    net.double()
    assert net[1].weight.dtype == torch.float64
    assert is_foreign(net[1].weight)


def test_optimizer_keeps_its_groups_and_steps_own_parameters_only() -> None:
    net, oracle = network(), network()
    oracle.load_state_dict(net.state_dict())
    groups: list[Any] = [{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    alone = torch.optim.AdamW(oracle[0].parameters(), lr=0.1)
    replace_in_optimizer(optimizer, cut(net))
    for module, stepped in ((net, optimizer), (oracle, alone)):
        torch.manual_seed(0)
        module[0](torch.randn(2, 3)).sum().backward()
        stepped.step()
        stepped.zero_grad()
    assert torch.equal(net[0].weight, oracle[0].weight)
    assert [len(group["params"]) for group in optimizer.state_dict()["param_groups"]] == [2, 2]
    assert set(optimizer.state_dict()["state"]) == {0, 1}


AVERAGES: dict[str, Callable[[Any], Any]] = {
    "multi": lambda net: AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "single": lambda net: AveragedModel(net, avg_fn=get_ema_avg_fn(0.9)),
    "swa, with buffers": lambda net: AveragedModel(net, use_buffers=True),
}


@pytest.mark.parametrize("make", AVERAGES.values(), ids=AVERAGES.keys())
def test_weight_averages_work_on_each_part(make: Callable[[Any], Any]) -> None:
    net, oracle = network(), network()
    oracle.load_state_dict(net.state_dict())
    average, expected = make(net), make(oracle)
    cut(net)
    cut(average.module)
    for _ in range(3):
        with torch.no_grad():
            net[0].weight.add_(1.0)
            oracle[0].weight.add_(1.0)
        average.update_parameters(net)
        expected.update_parameters(oracle)
    assert torch.equal(average.module[0].weight, expected.module[0].weight)
    assert is_foreign(average.module[1].weight)


def test_clipping_by_hand_warns() -> None:
    net = network()
    cut(net)
    with pytest.warns(UserWarning, match="sees the gradients of this stage only"):
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)


def test_whole_again() -> None:
    net = network()
    net.add_module("tied", net[1])
    reference = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    cut(net)
    restore_whole(net, reference)
    assert not any(is_foreign(tensor) for tensor in net.state_dict().values())
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, reference[name])
    assert net.tied.weight is net[1].weight


def test_placeholder_of_a_tensor_has_its_memory_format() -> None:
    weight = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert Foreign.of(weight, "w", 1).stride() == weight.stride()
