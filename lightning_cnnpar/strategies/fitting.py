"""Whether a model fits a device, for the "auto" pipeline size."""

import os
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cnnpar._compat import storage_key
from lightning_cnnpar.config import divisors

# Training keeps a parameter, its gradient and up to two optimizer states of its size.
TRAINING_COPIES = 4
# What the allocator, the framework and buffers of communication need beside.
HEADROOM = 0.9


def smallest_fitting_pipeline(module: nn.Module, device: torch.device, devices_per_node: int) -> int:
    """The smallest divisor of a node's devices over which the model with gradients and optimizer fits.

    Activations are counted with the module's `example_input_array`, where it has one; else they are left out and only
    parameters, gradients and two optimizer states count.
    """
    needed = training_bytes(module) + activation_bytes(module)
    available = usable_memory(device, devices_per_node)
    for size in divisors(devices_per_node):
        if needed / size <= available:
            return size
    return devices_per_node


def training_bytes(module: nn.Module) -> int:
    """Bytes of the parameters, their gradients and two optimizer states."""
    return TRAINING_COPIES * sum(parameter.nbytes for parameter in module.parameters())


def usable_memory(device: torch.device, devices_per_node: int) -> float:
    """Bytes that a rank may fill with these."""
    return HEADROOM * device_memory(device, devices_per_node)


def device_memory(device: torch.device, devices_per_node: int) -> int:
    """Bytes that one rank may use: the device's memory, or its share of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // devices_per_node


def activation_bytes(module: nn.Module) -> int:
    """Bytes that autograd keeps for a backward over `example_input_array`, found without computing; 0 if unknown."""
    example: Any = getattr(module, "example_input_array", None)
    if example is None:
        return 0
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    try:
        state = {name: tensor.to("meta") for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        inputs = tuple(value.to("meta") for value in ((example,) if isinstance(example, Tensor) else tuple(example)))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            torch.func.functional_call(module, state, inputs)
    except Exception:
        # Networks that can't run without values: parameters alone decide then.
        return 0
    return sum(kept.values())
