"""How the ranks of a node start: Lightning's own launchers, with a check before the first process."""

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from lightning_cnnpar._compat import multi_processing_launcher, subprocess_script_launcher
from lightning_cnnpar.config import StartMethod
from lightning_cnnpar.launchers.preempted import EXIT_CODE, Preempted
from lightning_cnnpar.launchers.threads import reserve_threads

_SubprocessScriptLauncher = subprocess_script_launcher()
_MultiProcessingLauncher = multi_processing_launcher()


class Launchable(Protocol):
    """What a launcher needs of the strategy."""

    options: Any
    cluster_environment: Any
    num_processes: int
    num_nodes: int

    def check_before_launch(self) -> None:
        """Refuse a run that can be seen to fail."""

    def describe_rank(self, local_rank: int) -> str:
        """Rank, replica and stage of a process of this node, in words."""

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks that this one failed."""


def make_launcher(strategy: Any, start_method: StartMethod) -> Any:
    """The launcher of a start method; under torchrun and SLURM no process is started, only the check is made."""
    if start_method == "popen":
        return CheckedScriptLauncher(strategy)
    return CheckedProcessLauncher(strategy, start_method)


class CheckedScriptLauncher(_SubprocessScriptLauncher):  # type: ignore[misc, valid-type]
    """Runs the script once for each rank."""

    def __init__(self, strategy: Launchable) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._check = strategy.check_before_launch
        self._binds = strategy.options.numa != "off"

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Check, start the other ranks, run `function` as rank 0."""
        self._check()
        if self.num_processes * self.num_nodes == 1:
            # Nothing is started and nothing has to be watched.
            return function(*args, **kwargs)
        if self._binds:
            reserve_threads(self.num_processes)
        return super().launch(function, *args, trainer=trainer, **kwargs)


class CheckedProcessLauncher(_MultiProcessingLauncher):  # type: ignore[misc, valid-type]
    """Starts processes that run `function`."""

    def __init__(self, strategy: Any, start_method: StartMethod) -> None:
        super().__init__(strategy, start_method)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Check, start all ranks, return what rank 0 returned."""
        self._strategy.check_before_launch()
        if self._strategy.options.numa != "off":
            reserve_threads(self._strategy.num_processes)
        try:
            reporting = functools.partial(_run_and_report, function, self._strategy)
            with _handed_on(lambda: self.procs):
                return super().launch(reporting, *args, trainer=trainer, **kwargs)
        except (ProcessExitedException, ProcessRaisedException) as error:
            if getattr(error, "exit_code", None) == EXIT_CODE:
                raise Preempted("The ranks were preempted.") from None
            error.add_note(f"That process was {self._strategy.describe_rank(error.error_index)}.")
            raise


@contextlib.contextmanager
def _handed_on(processes: Callable[[], Sequence[Any]]) -> Iterator[None]:
    """Hand signals that announce the end of a job on to the ranks, while their parent waits for them."""
    parent = os.getpid()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}

    def hand_on(number: int, frame: Any) -> None:
        if os.getpid() != parent:
            # A rank that was forked and has no handler of its own yet.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        for process in processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, hand_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_and_report(function: Callable[..., Any], strategy: Launchable, *args: Any, **kwargs: Any) -> Any:
    """Run the Trainer in a started process: there, Lightning leaves it to the launcher to notice exceptions."""
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        strategy.on_exception(error)
        raise
