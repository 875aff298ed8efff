"""Times the training steps of a run, to tell the user where the time went."""

import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback

from lightning_cnnpar.metrics import TimeSplit

# The first steps start workers and cut networks.
_UNCOUNTED_STEPS = 2


class StepTimes(Callback):
    """Splits the time of training steps. Between the end of a step and the start of the next, data is waited for.

    Args:
        waits: Seconds that this rank has waited so far for other stages, and for gradients of other replicas.
    """

    def __init__(self, waits: Callable[[], tuple[float, float]]) -> None:
        self._waits = waits
        self._left_out = _UNCOUNTED_STEPS
        self._last_end: float | None = None
        self._begin = 0.0
        self._waits_at_begin = (0.0, 0.0)
        self.split = TimeSplit()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Data is waited for from here on."""
        self._last_end = time.perf_counter()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """The batch is here."""
        self._begin = time.perf_counter()
        self._waits_at_begin = self._waits()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The step is done."""
        end = time.perf_counter()
        begin = self._begin if self._last_end is None else self._last_end
        self._last_end = end
        if self._left_out:
            self._left_out -= 1
            return
        pipeline, gradients = (now - then for now, then in zip(self._waits(), self._waits_at_begin, strict=True))
        self.split += TimeSplit(
            steps=1, total=end - begin, data=self._begin - begin, pipeline=pipeline, gradients=gradients
        )

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """What passes until the next step isn't waiting for data."""
        self._last_end = None
