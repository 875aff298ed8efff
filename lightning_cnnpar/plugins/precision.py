"""Precision over pipeline stages: Lightning's own plugins, with norms and overflow agreed by all ranks.

The step runs on every rank inside Lightning's autocast region, and a stage's forward runs inside the step, so autocast
reaches each stage by itself. Three decisions need the other ranks: the global gradient norm, whether any gradient is
infinite, and the type that activations have on the wire.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn

from lightning_cnnpar._compat import overflow_flag

_TRUE_HALF = ("bf16-true", "16-true")
_MIXED = ("bf16-mixed", "16-mixed")
_ALIASES = {
    "32": "32-true",
    "64": "64-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    32: "32-true",
    64: "64-true",
    16: "16-mixed",
}


class Agreement(Protocol):
    """What the ranks of a run agree on; the strategy implements it."""

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Clip by the norm over all stages."""

    def any_rank(self, flag: Tensor) -> None:
        """Replace `flag` by its maximum over all ranks, in place."""

    def on_overflow(self, flag: Tensor) -> None:
        """Learn whether the step is skipped: `flag` is not zero then, on every rank."""


class HybridPrecision(Precision):
    """Any of Lightning's precisions, right over pipeline stages.

    Args:
        precision: "32-true", "64-true", "bf16-true", "16-true", "bf16-mixed" or "16-mixed".
        channels_last: Keep 4-d weights in channels_last memory format, which convolutions on tensor cores prefer. The
            numbers change only in the last bits. `None` leaves the module as it is.
        wire_dtype: Floating type of activations and their gradients between stages, such as `torch.bfloat16`; `None`
            sends them as they are.

    Raises:
        ValueError: If `precision` is none of those above.
    """

    def __init__(
        self,
        precision: str = "bf16-mixed",
        channels_last: bool | None = True,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self._inner: Precision | None = None
        self._agreement: Agreement | None = None
        self._device = "cpu"
        self.precision: Any = _ALIASES.get(precision, precision)
        self.channels_last = channels_last
        self.wire_dtype = wire_dtype
        if self.precision not in (*_TRUE_HALF, *_MIXED, "32-true", "64-true"):
            known = ", ".join(map(repr, ("32-true", "64-true", *_TRUE_HALF, *_MIXED)))
            raise ValueError(f"HybridPrecision(precision={precision!r}): unknown. Known: {known}.")

    @classmethod
    def around(cls, plugin: Precision) -> Precision:
        """The plugin that Lightning chose for `Trainer(precision=...)`, made right over stages.

        Only Lightning's own plugins are taken over; a user's subclass is left as it is.
        """
        if type(plugin) not in (Precision, MixedPrecision, DoublePrecision, HalfPrecision):
            return plugin
        hybrid = cls(plugin.precision, channels_last=None)
        hybrid._adopt(plugin)
        return hybrid

    def attach(self, agreement: Agreement, device: torch.device) -> None:
        """Connect to the ranks of the run; before any gradient is clipped or scaled."""
        self._agreement = agreement
        self._device = device.type
        scaler = self.scaler
        if scaler is not None:
            agreed_scaler(scaler, agreement, device)

    @property
    def inner(self) -> Precision:
        """The Lightning plugin that does the rest."""
        if self._inner is None:
            self._adopt(self._make())
        assert self._inner is not None
        return self._inner

    @property
    def scaler(self) -> Any:
        """The loss scaler, with "16-mixed"."""
        return getattr(self.inner, "scaler", None)

    @property
    def checkpoint_key(self) -> str:
        """Under which key a single process saves the state of this precision."""
        return type(self.inner).__qualname__

    def _make(self) -> Precision:
        if self.precision in _MIXED:
            return MixedPrecision(self.precision, self._device)
        if self.precision in _TRUE_HALF:
            return HalfPrecision(self.precision)
        return DoublePrecision() if self.precision == "64-true" else Precision()

    def _adopt(self, plugin: Precision) -> None:
        self._inner = plugin
        # The inner plugin decides when to clip; how is decided here.
        plugin.clip_grad_by_norm = self.clip_grad_by_norm  # type: ignore[method-assign]

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clip by the global norm: squares summed over all stages."""
        parameters = self.inner.main_params(optimizer)
        if self._agreement is None:
            torch.nn.utils.clip_grad_norm_(parameters, clip_val)
        else:
            self._agreement.clip_grad_norm_(parameters, clip_val)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast the module as the chosen precision asks, and set the memory format."""
        module = self.inner.convert_module(module)
        if self.channels_last:
            module = module.to(memory_format=torch.channels_last)
        return module

    # What follows is handed on to the inner plugin as it is.

    def convert_input(self, data: Any) -> Any:
        """See Lightning's `Precision.convert_input`."""
        return self.inner.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        """See Lightning's `Precision.convert_output`."""
        return self.inner.convert_output(data)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """See Lightning's `Precision.tensor_init_context`."""
        return self.inner.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """See Lightning's `Precision.module_init_context`."""
        return self.inner.module_init_context()

    def forward_context(self) -> AbstractContextManager[Any]:
        """See Lightning's `Precision.forward_context`."""
        return self.inner.forward_context()

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """See Lightning's `Precision.pre_backward`."""
        return self.inner.pre_backward(tensor, module)

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """See Lightning's `Precision.backward`."""
        self.inner.backward(tensor, model, optimizer, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        """See Lightning's `Precision.post_backward`."""
        return self.inner.post_backward(tensor, module)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """See Lightning's `Precision.optimizer_step`."""
        return self.inner.optimizer_step(optimizer, model=model, closure=closure, **kwargs)

    def clip_gradients(self, optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """See Lightning's `Precision.clip_gradients`."""
        self.inner.clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    def main_params(self, optimizer: Any) -> Any:
        """See Lightning's `Precision.main_params`."""
        return self.inner.main_params(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """State of the loss scaler, where there is one."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.inner.load_state_dict(state_dict)

    def teardown(self) -> None:
        """See Lightning's `Precision.teardown`."""
        self.inner.teardown()


def agreed_scaler(scaler: Any, agreement: Agreement, device: torch.device) -> None:
    """Make a `GradScaler` see an overflow on any rank: all ranks skip the step, or none.

    The agreement is made inside `unscale_`, so that gradients are unscaled before they are clipped and every rank knows
    the outcome before `step`. A rank whose stage has no gradients agrees too.
    """
    unscale = type(scaler).unscale_

    def unscale_and_agree(optimizer: torch.optim.Optimizer) -> None:
        unscale(scaler, optimizer)
        flag = overflow_flag(scaler, optimizer, device)
        agreement.any_rank(flag)
        agreement.on_overflow(flag)

    scaler.unscale_ = unscale_and_agree
