"""What a step logs when it runs once for each microbatch: one value for the whole step, as if it had run once.

    microbatch 0   self.log("loss", 2.0) ─┐
    microbatch 1   self.log("loss", 4.0) ─┴─► self.log("loss", 3.0), weighted by samples; or the sum, max, min

A torchmetrics metric has been updated by every microbatch already; its value on the step is averaged in the same way.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_cnnpar._compat import metric_step_value, set_metric_step_value

_NAMES = ("name", "value", "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")
_MORE = ("sync_dist_group", "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only")


@final
class StepLogs:
    """Collects the `log` calls of one step.

    Args:
        module: Whose `log` is stood in for.
        sizes: Samples in each microbatch.
    """

    def __init__(self, module: Any, sizes: Sequence[int]) -> None:
        self._module, self._sizes = module, sizes
        self._log: Callable[..., None] = module.log
        self._calls: dict[tuple[str, int], list[tuple[int, dict[str, Any], Any]]] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self.microbatch = 0

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect inside of the block, and log at its end."""
        own = vars(self._module).get("log")
        vars(self._module)["log"] = self._collect
        try:
            yield
        finally:
            if own is None:
                del vars(self._module)["log"]
            else:
                vars(self._module)["log"] = own
        for (name, _), calls in self._calls.items():
            self._log_once(name, calls)

    def _collect(self, *args: Any, **kwargs: Any) -> None:
        given = dict(zip((*_NAMES, *_MORE), args, strict=False)) | kwargs
        name, value = given["name"], given["value"]
        # A name that is logged twice in a step stays two calls; Lightning decides what that means.
        again = self._counts[self.microbatch, name] = self._counts.get((self.microbatch, name), -1) + 1
        step_value = metric_step_value(value) if isinstance(value, Metric) else value
        self._calls.setdefault((name, again), []).append((self.microbatch, given, step_value))

    def _log_once(self, name: str, calls: list[tuple[int, dict[str, Any], Any]]) -> None:
        calls.sort(key=lambda call: call[0])
        given = dict(calls[0][1])
        values = [value for _, _, value in calls]
        sizes = [call["batch_size"] if call.get("batch_size") is not None else self._sizes[m] for m, call, _ in calls]
        if given.get("batch_size") is not None or len(calls) < len(self._sizes):
            given["batch_size"] = sum(sizes)
        combined = combine(values, sizes, given.get("reduce_fx", "mean")) if values[0] is not None else None
        if isinstance(given["value"], Metric):
            set_metric_step_value(given["value"], combined)
        else:
            given["value"] = combined
        self._log(**given)


def combine(values: Sequence[Any], sizes: Sequence[int], reduce_fx: Any = "mean") -> Any:
    """One value for several microbatches.

    Args:
        values: Numbers or tensors, by microbatch.
        sizes: Samples of each.
        reduce_fx: "mean" weights by samples; "sum", "max", "min", or a function of the stacked values.
    """
    first = values[0]
    if isinstance(first, dict):
        return {key: combine([value[key] for value in values], sizes, reduce_fx) for key in first}
    tensors = [value if isinstance(value, Tensor) else torch.as_tensor(value) for value in values]
    stacked = torch.stack([tensor.detach() for tensor in tensors])
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    if name in ("mean", "avg"):
        stacked = (
            stacked if stacked.is_floating_point() or stacked.is_complex() else stacked.to(torch.get_default_dtype())
        )
        weights = torch.tensor(sizes, dtype=stacked.real.dtype, device=stacked.device) / sum(sizes)
        return (stacked * weights.view(-1, *[1] * (stacked.dim() - 1))).sum(0)
    if name == "sum":
        return stacked.sum(0)
    if name in ("max", "min"):
        return stacked.amax(0) if name == "max" else stacked.amin(0)
    return reduce_fx(stacked)
