"""Backward passes in two halves: first the gradients of inputs, later those of weights.

A convolution or a linear layer has two independent gradients that cost about the same. Only that of its input is waited
for by the stage before, so that of its weight may be computed when there is nothing else to do (Qi et al., 2023,
arXiv:2401.10241).

    forward     F.conv2d(x, w, b) ─► a node of ours with the same result
    I           node: gradient of x now; what the gradients of w and b need goes on the list
    W           the list: gradients of w and b, summed over the uses of a weight, accumulated as autograd does

All other operations (BatchNorm, activations) give all their gradients in I; their weights are small. So do layers whose
weight is computed from other parameters, as with weight norm.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


@dataclasses.dataclass(frozen=True)
class _Weights:
    """A weight, its bias if there is one, and how to compute their gradients."""

    parameters: tuple[Tensor, ...]
    gradients: Callable[[], Sequence[Tensor]]


@final
class WeightGradients(TorchFunctionMode):
    """Forwards inside of the block can have their backward split; `compute` runs the second half of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[_Weights] = []
        self._defers = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace a layer that can be split."""
        make = _LAYERS.get(func)
        if make is not None and torch.is_grad_enabled():
            split = make(*args, **(kwargs or {}))
            if split is not None and _are_parameters(split):
                # To autograd the weight is a constant: its hooks would run on a backward that brings no gradient.
                return _Split.apply(self, split, split.input, torch.empty(0, requires_grad=True))
        return func(*args, **(kwargs or {}))

    def defer(self, enabled: bool) -> None:
        """Whether backward passes from now on leave gradients of weights for `compute`."""
        self._defers = enabled

    def compute(self) -> None:
        """Compute what was left, and accumulate it."""
        waiting, self._waiting = self._waiting, []
        uses: dict[int, int] = {}
        for weights in waiting:
            for parameter in weights.parameters:
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
        totals: dict[int, Tensor] = {}
        for weights in waiting:
            for parameter, gradient in zip(weights.parameters, weights.gradients(), strict=True):
                key = id(parameter)
                totals[key] = totals[key] + gradient if key in totals else gradient
                uses[key] -= 1
                if not uses[key]:
                    # Through autograd, so that the parameter's hooks run, once.
                    torch.autograd.backward([parameter], [totals.pop(key)])

    def _take(self, weights: _Weights) -> None:
        self._waiting.append(weights)
        if not self._defers:
            self.compute()


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A convolution or a linear layer, as one call of it."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, bool, bool, bool], Sequence[Tensor | None]]
    """Gradient of the output, input, weight, and which gradients are wanted: input, weight, bias."""


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, store: WeightGradients, layer: _Layer, x: Tensor, anchor: Tensor) -> Tensor:
        kind, weight, bias = x.device.type, layer.weight.detach(), layer.bias
        ctx.store, ctx.layer, ctx.type = store, layer, x.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight = _cast(x, dtype), _cast(weight, dtype)
            bias = None if bias is None else _cast(bias, dtype)
        ctx.save_for_backward(x, weight)
        with torch.autocast(kind, enabled=False):
            return layer.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        layer: _Layer = ctx.layer
        gradient = gradient.to(x.dtype)
        given = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
        parameters = tuple(parameter for parameter in given if parameter.requires_grad)

        def weights() -> list[Tensor]:
            needs_bias = layer.bias is not None and layer.bias.requires_grad
            _, *both = layer.backward(gradient, x, weight, False, layer.weight.requires_grad, needs_bias)
            found = [each for each in both if each is not None]
            return [each.to(parameter.dtype) for each, parameter in zip(found, parameters, strict=True)]

        of_input: Tensor | None = None
        if ctx.needs_input_grad[2]:
            of_input = layer.backward(gradient, x, weight, True, False, False)[0]
            of_input = None if of_input is None else of_input.to(ctx.type)
        ctx.store._take(_Weights(parameters, weights))
        return None, None, of_input, None


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def _are_parameters(layer: _Layer) -> bool:
    given = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    return layer.weight.requires_grad and all(tensor.is_leaf for tensor in given)


# ---- the layers ------------------------------------------------------------------------------------------------------


def _convolution(dims: int, transposed: bool) -> Callable[..., _Layer | None]:
    def spread(value: int | Sequence[int]) -> list[int]:
        return [value] * dims if isinstance(value, int) else list(value) * (dims if len(value) == 1 else 1)

    def plain(
        input: Tensor,  # noqa: A002 - names as in torch.nn.functional
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> _Layer | None:
        return layer(input, weight, bias, stride, padding, 0, groups, dilation)

    def layer(
        input: Tensor,  # noqa: A002
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> _Layer | None:
        if isinstance(padding, str) or input.dim() != dims + 2:
            return None
        shape: Any = (*map(spread, (stride, padding, dilation)), transposed, spread(output_padding), groups)

        def backward(
            gradient: Tensor, x: Tensor, w: Tensor, needs_input: bool, needs_weight: bool, needs_bias: bool
        ) -> Sequence[Tensor | None]:
            sizes = None if bias is None else list(bias.shape)
            wanted = [needs_input, needs_weight, needs_bias]
            found = torch.ops.aten.convolution_backward(gradient, x, w, sizes, *shape, wanted)
            return [each if needed else None for each, needed in zip(found, wanted, strict=True)]

        return _Layer(input, weight, bias, lambda x, w, b: torch.convolution(x, w, b, *shape), backward)

    return layer if transposed else plain


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Layer:  # noqa: A002
    def backward(
        gradient: Tensor, x: Tensor, w: Tensor, needs_input: bool, needs_weight: bool, needs_bias: bool
    ) -> Sequence[Tensor | None]:
        rows = gradient.flatten(0, -2) if gradient.dim() > 1 else gradient[None]
        return [
            gradient @ w if needs_input else None,
            rows.T @ (x.flatten(0, -2) if x.dim() > 1 else x[None]) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        ]

    return _Layer(input, weight, bias, F.linear, backward)


_LAYERS: dict[Any, Callable[..., _Layer | None]] = {
    F.conv1d: _convolution(1, False),
    F.conv2d: _convolution(2, False),
    F.conv3d: _convolution(3, False),
    F.conv_transpose1d: _convolution(1, True),
    F.conv_transpose2d: _convolution(2, True),
    F.conv_transpose3d: _convolution(3, True),
    F.linear: _linear,
}
