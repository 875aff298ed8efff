"""Whether an optimizer treats every element alike, so that it can step pieces of parameters.

Found out by letting it step the same numbers twice, as one matrix and as two pieces of one dimension.
"""

import inspect
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_STEPS = 3
_SHAPE = (6, 4)
_CUT = 10
_DEVICE_ONLY = ("capturable", "fused")


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether pieces end where the whole does; `None` if the optimizer can't be tried without knowing it."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_SHAPE, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(_SHAPE, generator=generator, dtype=torch.float64) for _ in range(_STEPS)]
    try:
        whole = _stepped(optimizer, [start], [[gradient] for gradient in gradients])
    except Exception:
        return None
    try:
        pieces = _stepped(optimizer, _cut(start), [_cut(gradient) for gradient in gradients])
    except Exception:
        return False
    return torch.allclose(torch.cat([whole[0].flatten()]), torch.cat(pieces), rtol=1e-9, atol=1e-12)


def _cut(tensor: Tensor) -> list[Tensor]:
    flat = tensor.flatten()
    return [flat[:_CUT], flat[_CUT:]]


def _stepped(
    optimizer: torch.optim.Optimizer, start: Iterable[Tensor], gradients: Iterable[Iterable[Tensor]]
) -> list[Tensor]:
    parameters = [nn.Parameter(tensor.clone()) for tensor in start]
    # Defaults hold more than what was given: AdamW notes there that it decouples the weight decay.
    known = inspect.signature(type(optimizer)).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in known and key not in _DEVICE_ONLY}
    tried = type(optimizer)(parameters, **options)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        tried.step()
    return [parameter.detach() for parameter in parameters]
