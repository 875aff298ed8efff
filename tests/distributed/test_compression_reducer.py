"""What residuals go through when buckets change, parameters rest, and passes fail."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cnnpar.compression import CompressionEngine, CompressionPolicy, Compressor, Int2, OneBit, PowerSGD, TopK
from lightning_cnnpar.data_parallel.comm_hook import CompressedReduce
from lightning_cnnpar.data_parallel.replicate import GradientReducer
from lightning_cnnpar.mesh import Mesh, create_data_group, create_mesh
from tests.ranks import RankError, run_ranks

CODECS: dict[str, Compressor] = {
    "int2": Int2(min_numel=1, block=8),
    "onebit": OneBit(min_numel=1, block=8),
    "topk": TopK(ratio=0.1, min_numel=1),
    "powersgd": PowerSGD(rank=1, min_numel=1),
}
# What a step does with the second layer, while the first one always trains.
STEPS = ("used", "used", "unused", "frozen", "used", "late", "unused", "used")


class Net(nn.Module):
    """Two layers of one bucket, of which the second may rest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(12, 6, bias=False)
        self.second = nn.Linear(12, 6, bias=False)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y: Tensor = self.first(x).square().mean()
        return y + self.second(x).pow(3).mean() if both else y


def engine_of(codec: Compressor, mesh: Mesh) -> CompressionEngine:
    return CompressionEngine(CompressionPolicy.of(codec), group=create_data_group(mesh), device=torch.device("cpu"))


def gathered(engine: CompressionEngine, mesh: Mesh) -> dict[str, Any]:
    """The engine's state, whole on the first rank."""
    assert mesh.data_control_group is not None
    return engine.gather_state(mesh.data_control_group)


def _backward(net: Net, step: int, rank: int, kind: str, dtype: torch.dtype = torch.float32) -> None:
    """Like a user's step; with `late`, the graph gives a gradient to what is frozen when the pass begins."""
    net.zero_grad()
    net.second.requires_grad_(kind != "frozen")
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)
    loss = net(x, both=kind != "unused")
    net.second.requires_grad_(kind not in ("frozen", "late"))
    loss.backward()
    net.second.requires_grad_(True)


class Account:
    """What a rank's optimizer got, and what the ranks together should get."""

    def __init__(self, net: Net, size: int) -> None:
        self._net, self._size = net, size
        self.missing = {name: torch.zeros_like(value) for name, value in net.named_parameters()}

    def step(self, step: int, rank: int, kind: str) -> None:
        _backward(self._net, step, rank, kind)
        for name, parameter in self._net.named_parameters():
            self.missing[name] -= 0 if parameter.grad is None else parameter.grad
        for other in range(self._size):
            oracle = Net()
            _backward(oracle, step, other, kind)
            for name, parameter in oracle.named_parameters():
                self.missing[name] += 0 if parameter.grad is None else parameter.grad / self._size

    def lost(self, state: dict[str, Any]) -> float:
        """What was neither given out nor kept. `state` is on the first rank."""
        return max(
            float((missing - state["residuals"][name].sum(0)).abs().max()) for name, missing in self.missing.items()
        )


def _rest(rank: int, size: int) -> dict[str, tuple[float, float]]:
    mesh = create_mesh(size, 1)
    found = {}
    for name, codec in CODECS.items():
        net, engine = Net(), engine_of(codec, mesh)
        reducer = GradientReducer(list(net.named_parameters()), mesh=mesh, hook=CompressedReduce(engine))
        account = Account(net, size)
        for step, kind in enumerate(STEPS):
            account.step(step, rank, kind)
        reducer.remove()
        state = gathered(engine, mesh)
        missing = min(float(value.abs().max()) for value in account.missing.values())
        found[name] = (missing, account.lost(state) if rank == 0 else 0.0)
        engine.close()
    return found


def test_nothing_is_lost_of_parameters_that_rest_for_a_step() -> None:
    for name, (missing, lost) in run_ranks(2, _rest, timeout=60)[0].items():
        assert missing > 1e-3, name
        assert lost < 1e-5, name


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ZeroDivisionError


def _failed_pass(rank: int, size: int) -> dict[str, list[dict[str, Any]]]:
    mesh = create_mesh(size, 1)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CODECS}
    for name, codec in CODECS.items():
        for fails in (True, False):
            net, engine = Net(), engine_of(codec, mesh)
            reducer = GradientReducer(list(net.named_parameters()), mesh=mesh, hook=CompressedReduce(engine))
            _backward(net, 0, rank, "used")
            if fails:
                # Both layers are done, and their sums, which are infinite, are under way when the pass fails.
                with pytest.raises(ZeroDivisionError):
                    net(_Failing.apply(torch.full((5, 12), 1e30, requires_grad=True)), both=True).backward()
            _backward(net, 1, rank, "used")
            reducer.remove()
            found[name].append(gathered(engine, mesh))
            engine.close()
    return found


def test_a_pass_that_failed_leaves_no_trace() -> None:
    for name, (failed, other) in run_ranks(2, _failed_pass, timeout=60)[0].items():
        assert failed["step"] == other["step"] == 2, name
        assert failed["residuals"].keys() == other["residuals"].keys(), name
        for key, rows in failed["residuals"].items():
            assert torch.equal(rows, other["residuals"][key]), (name, key)


def _called_later(rank: int, size: int) -> dict[str, tuple[bool, float]]:
    """A run that goes on from a checkpoint, and calls its second layer only after a step."""
    mesh = create_mesh(size, 1)
    found = {}
    for name, codec in CODECS.items():
        net, engine = Net(), engine_of(codec, mesh)
        account = Account(net, size)
        reducer = GradientReducer(list(net.named_parameters()), mesh=mesh, hook=CompressedReduce(engine))
        for step in range(2):
            account.step(step, rank, "used")
        state: list[Any] = [gathered(engine, mesh) | {"order": reducer.order}]
        reducer.remove()
        engine.close()
        dist.broadcast_object_list(state, 0)

        engine = engine_of(codec, mesh)
        hook = CompressedReduce(engine)
        hook.resume(state[0])
        reducer = GradientReducer([("first.weight", net.first.weight)], mesh=mesh, hook=hook)
        account.step(2, rank, "unused")
        waits = torch.equal(gathered(engine, mesh)["waiting"]["second.weight"], state[0]["residuals"]["second.weight"])
        reducer.remove()
        reducer = GradientReducer(list(net.named_parameters()), mesh=mesh, hook=hook)
        account.step(3, rank, "used")
        reducer.remove()
        last = gathered(engine, mesh)
        found[name] = (waits and last["step"] == 4, account.lost(last) if rank == 0 else 0.0)
        engine.close()
    return found


def test_a_resumed_run_that_calls_a_network_later_takes_up_each_residual_once() -> None:
    for name, (waits, lost) in run_ranks(2, _called_later, timeout=60)[0].items():
        assert waits, name
        assert lost < 1e-5, name


def _other_format(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """A run whose convolution is in channels_last goes on from the checkpoint of one that was not."""
    mesh = create_mesh(size, 1)
    states: list[Any] = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        layer = nn.Conv2d(3, 4, 2, bias=False).to(memory_format=memory_format)
        engine = engine_of(CODECS["topk"], mesh)
        hook = CompressedReduce(engine)
        if states:
            hook.resume(states[0])
        reducer = GradientReducer(list(layer.named_parameters()), mesh=mesh, hook=hook)
        if not states:
            layer(torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(rank))).pow(3).mean().backward()
        states.append(gathered(engine, mesh) | {"order": []})
        dist.broadcast_object_list(states, 0)
        reducer.remove()
        engine.close()
    one, other = (state["residuals"]["weight"] for state in states)
    return one, other


def test_residuals_don_t_depend_on_the_memory_format() -> None:
    for one, other in run_ranks(2, _other_format, timeout=60):
        assert one.shape == (3, 4, 3, 2, 2)
        assert one.abs().max() > 0
        assert torch.equal(one, other)


def _other_network(rank: int, size: int) -> None:
    mesh = create_mesh(size, 1)
    engine = engine_of(CODECS["topk"], mesh)
    engine.load_state({"step": 3, "residuals": {"weight": torch.zeros(3, 5, 5)}})
    engine.take_up({"weight": torch.zeros(5, 6)})


def test_residuals_of_another_network_are_refused() -> None:
    with pytest.raises(RankError, match=r"residual of 'weight' in the checkpoint has shape \(5, 5\), .* \(5, 6\)"):
        run_ranks(2, _other_network, timeout=60)


def _momentum(rank: int, size: int) -> dict[str, float]:
    """Gradients that travel as they are: how far a velocity on each rank is from the optimizer's momentum."""
    mesh = create_mesh(size, 1)
    nets = []
    for momentum in (0.0, 0.9):
        policy = CompressionPolicy.of({"nothing": TopK(momentum=0.9), "*": None} if not momentum else {"*": None})
        engine = CompressionEngine(policy, group=create_data_group(mesh), device=torch.device("cpu"))
        net = Net().double()
        reducer = GradientReducer(list(net.named_parameters()), mesh=mesh, hook=CompressedReduce(engine))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum)
        for step, kind in enumerate(STEPS[:5]):
            _backward(net, step, rank, kind, torch.float64)
            optimizer.step()
        reducer.remove()
        engine.close()
        nets.append(net)
    pairs = zip(nets[0].named_parameters(), nets[1].parameters(), strict=True)
    return {name: float((one - other).detach().abs().max()) for (name, one), other in pairs}


def test_velocities_that_travel_as_they_are_equal_the_optimizer_s_momentum() -> None:
    for differences in run_ranks(2, _momentum, timeout=60):
        assert max(differences.values()) < 1e-10, differences


def _outside(rank: int, size: int) -> None:
    mesh = create_mesh(1, 2)
    hook = CompressedReduce(
        CompressionEngine(
            CompressionPolicy.of(TopK(momentum=0.9)),
            group=dist.new_group(),
            device=torch.device("cpu"),  # type: ignore[arg-type]
        )
    )
    net = Net()
    reducer = GradientReducer([], mesh=mesh, world_parameters=list(net.named_parameters()), hook=hook)
    _backward(net, 0, rank, "used")
    reducer.remove()


def test_momentum_of_parameters_outside_of_the_stages_is_refused() -> None:
    with pytest.raises(RankError, match=r"'first.weight', 'second.weight' are outside of them"):
        run_ranks(2, _outside, timeout=60)


def _dense_later(rank: int, size: int) -> float:
    """A schedule that ends in gradients as they are."""
    mesh = create_mesh(size, 1)
    policy = CompressionPolicy.of({0: CODECS["onebit"], 3: None})
    engine = CompressionEngine(policy, group=create_data_group(mesh), device=torch.device("cpu"))
    net = Net()
    reducer = GradientReducer(list(net.named_parameters()), mesh=mesh, hook=CompressedReduce(engine))
    account = Account(net, size)
    for step in range(5):
        account.step(step, rank, "used")
    reducer.remove()
    engine.close()
    return max(float(missing.abs().max()) for missing in account.missing.values())


def test_what_was_left_out_is_delivered_when_compression_ends() -> None:
    assert max(run_ranks(2, _dense_later, timeout=60)) < 1e-5
