"""Hooks around the moment at which autograd adds a gradient to a parameter.

    backward of the last layer that uses w ──► before_accumulation ──► w.grad += g ──► after_accumulation

Both hooks may be registered on frozen parameters: they stay silent until the parameter is unfrozen.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

NamedParameter = tuple[str, nn.Parameter]


def is_trainable_kind(parameter: nn.Parameter) -> bool:
    """Whether it can ever get a gradient here: its values are not on `meta`, and of a differentiable dtype."""
    return parameter.device.type != "meta" and (parameter.is_floating_point() or parameter.is_complex())


def after_accumulation(named: NamedParameter, callback: Callable[[], None]) -> RemovableHandle:
    """Call `callback` each time a gradient was added to the parameter."""
    name, parameter = named

    def hook(accumulated: Tensor) -> None:
        if accumulated.grad is not None and accumulated.grad.is_sparse:
            raise RuntimeError(
                f"The gradient of {name!r} is sparse (shape {tuple(accumulated.shape)}), and sparse gradients can't be"
                f" averaged over replicas. Use `torch.nn.Embedding(..., sparse=False)`."
            )
        callback()

    return _register(parameter, parameter.register_post_accumulate_grad_hook, hook)


def before_accumulation(named: NamedParameter, callback: Callable[[], None]) -> RemovableHandle:
    """Call `callback` each time a gradient is about to be added to the parameter."""
    _, parameter = named

    def hook(_: Tensor) -> None:
        callback()

    return _register(parameter, parameter.register_hook, hook)


def _register(
    parameter: nn.Parameter,
    register: Callable[[Callable[[Tensor], None]], RemovableHandle],
    hook: Callable[[Tensor], None],
) -> RemovableHandle:
    # torch refuses to register on frozen parameters, but keeps what was registered when they are frozen later.
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        return register(hook)
    finally:
        if frozen:
            parameter.requires_grad_(False)
