"""What the parts of a network cost: operations, parameters or memory.

Costs are of one forward and backward of the example batch. With F operations in the forward, a part takes F more for
the gradients of its inputs if anything before it trains, and F more for those of its own parameters if these train.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal
from unittest import mock

from torch import Tensor, nn

from lightning_cnnpar import tree
from lightning_cnnpar.partition.abstract import AbstractNetwork, Work, run_unhooked

Metric = Literal["flops", "time", "memory", "parameters"]

# Gradients and two moments beside each parameter, as Adam keeps them.
_COPIES_OF_PARAMETERS = 4
# What sending a byte (forward, and its gradient back) is worth against the metric's unit. Operations: a core or device
# does some tens of them in the time in which its link moves a byte. Time is estimated by operations. Where balance is
# about memory, sizes of cuts only break ties.
TRANSFER_WEIGHT: Mapping[str, float] = {"flops": 16.0, "time": 16.0, "memory": 1e-6, "parameters": 1e-9}


def memory_in_bytes(elements: float, activation_bytes: float) -> float:
    """Bytes of float32 parameters with gradients and optimizer state, and of activations."""
    return float(_COPIES_OF_PARAMETERS * 4 * elements + activation_bytes)


def module_shares(
    network: AbstractNetwork, forward: Callable[..., Any], leaves: Sequence[Any], spec: tree.TreeSpec, metric: Metric
) -> tuple[dict[str, float], bool]:
    """Share of each module, with all inside it, in the cost of the whole network.

    Returns:
        Share by module name, and whether operations could be counted (else shares are those of parameters).
    """
    work = None if metric == "parameters" else _module_work(network, forward, leaves, spec)
    total = work[""] if work is not None else Work()
    counted = work is not None and total.flops > 0
    weights: dict[str, float] = {}
    for name, module in network.root.named_modules():
        count = float(sum(parameter.numel() for parameter in module.parameters()))
        if counted and work is not None:
            own = work.get(name, Work())
            stored = memory_in_bytes(count, own.activation_bytes)
            weights[name] = stored if metric == "memory" else float(own.flops)
        else:
            weights[name] = count
    whole = weights[""] or 1.0
    return {name: weight / whole for name, weight in weights.items()}, counted or metric == "parameters"


def _module_work(
    network: AbstractNetwork, forward: Callable[..., Any], leaves: Sequence[Any], spec: tree.TreeSpec
) -> dict[str, Work] | None:
    """Work of each module in one forward without data; `None` if it doesn't run so."""
    names = {id(module): name for name, module in network.root.named_modules()}
    work: dict[str, Work] = {}
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = network.flops, network.activation_bytes
        result = run_unhooked(module, functools.partial(original, module), args, kwargs)
        name = names.get(id(module))
        if name is not None:
            add(name, network.flops - before[0], network.activation_bytes - before[1])
        return result

    def add(name: str, flops: int, activation_bytes: int) -> None:
        old = work.get(name, Work())
        work[name] = Work(flops=old.flops + flops, activation_bytes=old.activation_bytes + activation_bytes)

    def body() -> bool:
        args, kwargs = tree.unflatten(spec, network.fake(list(leaves)))
        with mock.patch.object(nn.Module, "__call__", call):
            outcome = network.run(forward, args, kwargs, on_zeros=False)
        work[""] = outcome.work
        return outcome.exact

    return work if network.within(body) else None


def size_in_bytes(tensor: Any) -> int:
    """Bytes of a tensor's elements; 0 for anything else."""
    return tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0
