"""Signals that announce the end of a job: one checkpoint between two batches, and an exit code that says "start again".

The handlers of the ranks run at different places, but a checkpoint of several ranks needs all of them at the same one.
So a handler only notes the signal, and the ranks agree at the ends of batches:

    signal ──► noted on this rank
    end of batch k      all-reduce of what is noted, in the background
    end of batch k + 1  its result: has any rank noted one? ──► all ranks save; then
                            SLURM's requeue signal      Lightning's handler: save, `scontrol requeue`, training goes on
                            SIGTERM, SIGUSR1            `Preempted` ends the run on every rank with exit code 75
"""

import logging
import os
import signal
import threading
import time
from typing import Any, final

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_cnnpar import _compat
from lightning_cnnpar.launchers.preempted import EXIT_CODE, Preempted

log = logging.getLogger(__name__)

_NOTHING, _REQUEUE, _STOP = range(3)
# Several senders may deliver what is meant as one signal; after this many seconds, another one means: now.
_AGAIN = 3.0


@final
class Preemption(Callback):
    """Holds back signals that ask for a checkpoint until the ranks are between two batches.

    Args:
        group: All ranks, on the CPU, for nothing else; `None` for a single one.
        place: This rank, in words.
    """

    def __init__(self, group: dist.ProcessGroup | None, place: str) -> None:
        self._group, self._place = group, place
        self._handlers: dict[int, Any] = {}
        self._kinds: dict[int, int] = {}
        self._noted = _NOTHING
        self._first: float | None = None
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    # ---- signals -----------------------------------------------------------------------------------------------------

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """The first hook after Lightning has set its handlers, where there is a validation."""
        self._take_over(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The first hook after Lightning has set its handlers, otherwise."""
        self._take_over(trainer)

    def _take_over(self, trainer: Any) -> None:
        """Take the place of Lightning's handlers, which communicate where they happen to run."""
        # Signals are handled by the main thread alone.
        if self._handlers or threading.current_thread() is not threading.main_thread():
            return
        self._kinds = {signal.SIGTERM: _STOP, signal.SIGUSR1: _STOP}
        environment = trainer.strategy.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            self._kinds[environment.requeue_signal or signal.SIGUSR1] = _REQUEUE
        for number, kind in list(self._kinds.items()):
            handler = signal.getsignal(number)
            if number == signal.SIGUSR1 and kind == _STOP and handler is not signal.SIG_DFL:
                del self._kinds[number]  # the user's own
                continue
            self._handlers[number] = handler
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        kind, now = self._kinds[number], time.monotonic()
        if self._noted == _STOP and self._first is not None and now - self._first > _AGAIN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._first = now if self._first is None else self._first
        self._noted = max(self._noted, kind)

    # ---- batches -----------------------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Do what a signal asks for, on all ranks."""
        agreed = self._agree()
        if agreed == _NOTHING:
            return
        if not _compat.is_between_steps(trainer, batch_idx):
            # Gradients that have been accumulated would be lost; the signal stays noted.
            self._noted = max(self._noted, agreed)
            return
        if agreed == _REQUEUE:
            self._noted = _NOTHING
            number = next(number for number, kind in self._kinds.items() if kind == _REQUEUE)
            self._handlers[number](number, None)
            return
        self._stop(trainer)

    def _agree(self) -> int:
        """What the ranks had noted at the end of the batch before."""
        if self._group is None:
            return self._noted
        agreed = _NOTHING
        if self._pending is not None:
            work, flag = self._pending
            work.wait()
            agreed = int(flag)
        flag = torch.tensor([self._noted], dtype=torch.int32, device="cpu")
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._pending = (work, flag)
        return agreed

    def _stop(self, trainer: Any) -> None:
        self._settle()
        _compat.ignore_signals(trainer, list(self._handlers))
        self._handlers = {}
        path = trainer.strategy.broadcast(_compat.preemption_path(trainer))
        trainer.save_checkpoint(path)
        trainer.strategy.checkpoint_io.teardown()  # a background save is complete after this
        trainer.strategy.barrier("preempted")
        rank_zero_info(
            f"Preempted: {path} holds step {trainer.global_step}. The run ends with exit code {EXIT_CODE}, which asks"
            " for another start."
        )
        raise Preempted(f"{self._place} was preempted at step {trainer.global_step}")

    def _settle(self) -> None:
        if self._pending is not None:
            work, self._pending = self._pending[0], None
            work.wait()

    # ---- end ---------------------------------------------------------------------------------------------------------

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """All ranks have had the same batches: the last agreement is waited for, and handlers are given back."""
        self._settle()
        self._give_back()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give handlers back."""
        self._give_back()

    def _give_back(self) -> None:
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            signal.signal(number, handler)
