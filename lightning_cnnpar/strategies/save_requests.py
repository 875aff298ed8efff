"""Checkpoints that a cluster asks for by a signal, written between two batches instead of in the midst of one.

SLURM announces the end of a job with a signal, and Lightning then saves inside of the signal handler. The handlers of
the ranks run at different places, but a checkpoint of several stages needs all ranks at the same one:

    signal ──► noted on this rank
    next batch: has any rank noted one? ──► all ranks run Lightning's handler: save, requeue
"""

import signal
import threading
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.plugins.environments import SLURMEnvironment


class SaveRequests(Callback):
    """Holds back the requeue signal of SLURM until the ranks are between two batches.

    Args:
        any_rank: Whether any rank says yes; a collective.
    """

    def __init__(self, any_rank: Callable[[bool], bool]) -> None:
        self._any_rank = any_rank
        self._signal: signal.Signals | None = None
        self._handler: Any = None
        self._noted = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the place of Lightning's handler."""
        environment = trainer.strategy.cluster_environment
        if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
            return
        wanted = environment.requeue_signal or signal.SIGUSR1
        handler = signal.getsignal(wanted)
        # Signals are handled by the main thread alone; elsewhere there is nothing to hold back.
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._signal, self._handler = wanted, handler
            signal.signal(wanted, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self._noted = True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Do what the signal asks for, on all ranks."""
        if self._signal is not None and self._any_rank(self._noted):
            self._noted = False
            self._handler(self._signal, None)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give Lightning's handler its place back."""
        self._give_back()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give Lightning's handler its place back."""
        self._give_back()

    def _give_back(self) -> None:
        if self._signal is not None:
            signal.signal(self._signal, self._handler)
            self._signal = None
