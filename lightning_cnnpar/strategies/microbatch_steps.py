"""The user's step, once for each microbatch, in the order that a schedule with few microbatches in flight wants.

For each microbatch m, every rank of a replica runs the same step; what lies between is the schedule's:

    P(m)    the step up to the network: preprocessing. Runs before this rank's first F(m)
    F(m)    this rank's stages, as the table says
    S(m)    the step after the network: loss, logs; then the loss runs backward to the network's outputs. Runs before
            this rank's first B(m)
    B(m)    this rank's stages backward, as the table says

With P = 2 and M = 3 under 1F1B:

    rank 0    P0 F0 P1 F1    S0 B0 P2 F2    S1 B1    S2 B2
    rank 1    P0    F0 S0 B0 P1 F1 S1 B1 P2 F2 S2 B2

So a step is left at its network call and gone on with later. It runs once for each microbatch and no part of it twice.
Each has random numbers of its own, which don't depend on the layout or the schedule. A network call that comes before
or after the first one with gradients is run at once, by all ranks together.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor

from lightning_cnnpar.mirror import step_generators
from lightning_cnnpar.pipeline.batches import Cut, cut_batch
from lightning_cnnpar.pipeline.batchnorm import DeferredStatistics, batch_norms
from lightning_cnnpar.pipeline.coroutine import Coroutine, suspend
from lightning_cnnpar.pipeline.errors import PipelineError
from lightning_cnnpar.pipeline.network import PipelineNetwork
from lightning_cnnpar.pipeline.schedules import Action, StepSchedule
from lightning_cnnpar.pipeline.stepping import NetworkStep
from lightning_cnnpar.strategies.step_logs import StepLogs, combine

SPLIT_HOOK = "split_microbatches"
"""A method of the LightningModule, (batch, num_microbatches) -> list of batches, for batches of unusual types."""


class Host(Protocol):
    """What the steps need of the networks of the run."""

    label: str

    @property
    def pipeline_size(self) -> int:
        """P."""

    def undistributed(self) -> contextlib.AbstractContextManager[None]:
        """Calls inside are not intercepted."""

    def one_round(self) -> contextlib.AbstractContextManager[None]:
        """All backward passes inside are one for the averaging of gradients."""

    def final_gradients(self, enabled: bool) -> None:
        """Whether gradients that come now are the last of their parameters in this step."""


@final
class MicrobatchSteps:
    """Runs steps of one run.

    Args:
        module: The LightningModule.
        host: The networks of the run.
        schedule: In which order stages run.
        num_microbatches: M, at most.
        device: Where this rank computes.
        deferred_batch_norm: Update running statistics once a step, as from the whole batch.
        backward: Runs a microbatch's weighted loss backward; told whether the graph is needed once more.
        warn: Says something to the user, once.

    Attributes:
        most_in_flight: In the last step, the most microbatches that this rank kept activations of.
    """

    def __init__(
        self,
        module: Any,
        host: Host,
        *,
        schedule: StepSchedule,
        num_microbatches: int,
        device: torch.device,
        deferred_batch_norm: bool,
        backward: Callable[[Tensor, bool], None],
        warn: Callable[[str], None],
    ) -> None:
        self.most_in_flight = 0
        self._module, self._host, self._schedule = module, host, schedule
        self._num_microbatches, self._device, self._deferred = num_microbatches, device, deferred_batch_norm
        self._backward, self._warn = backward, warn
        self._told: set[str] = set()
        self._step: _Step | None = None

    def cut(self, batch: Any) -> Cut:
        """The microbatches of a batch; a single one if it can't be cut."""
        hook = getattr(self._module, SPLIT_HOOK, None)
        if hook is not None:
            parts = list(hook(batch, self._num_microbatches))
            sizes = tuple(cut_batch(part, 1).sizes[0] for part in parts)
            return Cut(parts=parts, sizes=sizes)
        cut = cut_batch(batch, self._num_microbatches)
        if cut.reason and cut.reason not in self._told:
            self._told.add(cut.reason)
            self._warn(
                f"The step runs on the whole batch, not once for each of {self._num_microbatches} microbatches:"
                f" {cut.reason}. The numbers are right, but memory is that of schedule='gpipe'. Define"
                f" `{SPLIT_HOOK}(self, batch, num_microbatches)` in the LightningModule, returning a list of batches."
            )
        return cut

    def run(self, cut: Cut, step: Callable[[Any], Any]) -> Any:
        """Run a step and its backward.

        Args:
            cut: The batch.
            step: The user's step, of one microbatch.

        Returns:
            What the step returns for the whole batch, without graph: losses and other numbers averaged by samples,
            tensors with one entry per sample joined, anything else as a list.
        """
        logs = StepLogs(self._module, cut.sizes)
        current = _Step(self, cut, step, logs)
        self._step = current
        try:
            with logs.collecting():
                current.run()
        finally:
            self._step = None
            current.close()
        self.most_in_flight = current.most_in_flight
        return join_results(current.results, cut.sizes)

    @property
    def is_running(self) -> bool:
        """Whether a step runs microbatch by microbatch at the moment."""
        return self._step is not None

    def call(self, network: PipelineNetwork, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The step has come to a network."""
        assert self._step is not None
        return self._step.call(network, args, kwargs)


class _Call:
    """The network call at which a step is suspended."""

    def __init__(self, network: PipelineNetwork, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.network, self.args, self.kwargs = network, args, kwargs


class _Step:
    """One step: M coroutines and the table between them."""

    def __init__(self, owner: MicrobatchSteps, cut: Cut, step: Callable[[Any], Any], logs: StepLogs) -> None:
        self._owner, self._host, self._cut, self._logs = owner, owner._host, cut, logs
        generators = step_generators(len(cut.parts), owner._device)
        self._coroutines = [
            Coroutine(lambda part=part: step(part), owner._device, own)  # type: ignore[misc]
            for part, own in zip(cut.parts, generators, strict=True)
        ]
        self._calls: list[_Call] = []
        self._network: PipelineNetwork | None = None
        self._running: int | None = None
        self._suspended_once: set[int] = set()
        self.results: list[Any] = []
        self.most_in_flight = 0

    @property
    def _count(self) -> int:
        return len(self._coroutines)

    # ---- called from inside of a step --------------------------------------------------------------------------------

    def call(self, network: PipelineNetwork, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wait for the table if this is the call that it is for; else run at once."""
        m = self._running
        waits = m is not None and m not in self._suspended_once and torch.is_grad_enabled()
        if waits and self._host.pipeline_size > 1:
            self._suspended_once.add(m)  # type: ignore[arg-type]
            return suspend(_Call(network, args, kwargs))
        with self._host.undistributed():
            return network(args, kwargs, label=self._host.label, whole=True)

    # ---- the driver --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all microbatches."""
        if self._host.pipeline_size == 1:
            self._run_in_turn()
            return
        first = self._resume(0)
        if not isinstance(first, _Call):
            self._without_network(first)
            return
        self._network = first.network
        with self._host.undistributed():
            network = first.network.open_step(
                first.args,
                first.kwargs,
                label=self._host.label,
                schedule=self._owner._schedule,
                sizes=self._cut.sizes,
            )
        self._begun(network, first)
        with self._host.one_round():
            self._follow(network)
        self.most_in_flight = network.most_in_flight

    def _follow(self, network: NetworkStep) -> None:
        """Run this rank's table, with what the user's steps do in between."""
        last = _last_of_stages(network.table)
        for action in network.table:
            if action.kind == "F":
                self._begin_until(network, action.microbatch)
            elif action.kind != "W":
                self._end_until(network, action.microbatch)
            self._host.final_gradients(action in last)
            with self._host.undistributed():
                network.perform(action)
        for m in range(self._count):
            self._begin_until(network, m)
            self._end_until(network, m)
        with self._host.undistributed():
            passed_on = network.finish()
        for inputs, gradients in passed_on:
            if inputs:
                torch.autograd.backward(inputs, gradients)

    def _begin_until(self, network: NetworkStep, m: int) -> None:
        """P: all steps up to that of microbatch m have come to the network."""
        while len(self._calls) <= m:
            call = self._resume(len(self._calls))
            if not isinstance(call, _Call) or call.network is not self._network:
                assert self._network is not None
                raise PipelineError(
                    f"In {self._host.label}, the step calls network {self._network.name!r} for microbatch 0, but"
                    f" {'none' if not isinstance(call, _Call) else repr(call.network.name)} for microbatch"
                    f" {len(self._calls)}. With schedule={self._owner._schedule!r} every microbatch takes the same"
                    " way; use schedule='gpipe', which runs the step once for the whole batch."
                )
            self._begun(network, call)

    def _begun(self, network: NetworkStep, call: _Call) -> None:
        m = len(self._calls)
        with self._host.undistributed():
            network.begin(m, call.args, call.kwargs, self._coroutines[m].ambient)
        self._calls.append(call)

    def _end_until(self, network: NetworkStep, m: int) -> None:
        """S: all steps up to that of microbatch m have returned, and their losses have run backward."""
        while len(self.results) <= m:
            number = len(self.results)
            with self._host.undistributed():
                outputs = network.outputs(number)
            result = self._resume(number, outputs)
            del outputs
            self._end(number, result, keep=network.has_graph_before(number))

    def _end(self, m: int, result: Any, *, keep: bool = False, final: bool = False) -> None:
        """The step of a microbatch has returned: its loss runs backward."""
        self._host.final_gradients(final)
        loss = loss_of(result)
        if loss is not None:
            weight = self._cut.sizes[m] / sum(self._cut.sizes)
            self._owner._backward(loss if weight == 1 else loss * weight, keep)
        self.results.append(_detached(result))

    def _resume(self, m: int, message: Any = None) -> Any:
        self._running = self._logs.microbatch = m
        try:
            return self._coroutines[m].resume(message)
        except Exception as error:
            error.add_note(f"Raised by microbatch {m} of {self._count} in {self._host.label}.")
            raise
        finally:
            self._running = None

    # ---- without a table ---------------------------------------------------------------------------------------------

    def _run_in_turn(self) -> None:
        """One rank holds the whole network: one microbatch after the other."""
        statistics = DeferredStatistics(batch_norms(self._owner._module) if self._owner._deferred else (), self._count)
        with self._host.one_round():
            for m in range(self._count):
                with statistics.recording(), self._host.undistributed():
                    statistics.begin(0)
                    result = self._resume(m)
                self._end(m, result, final=m == self._count - 1)
        statistics.update()
        self.most_in_flight = 1

    def _without_network(self, first: Any) -> None:
        """The step calls no network that is cut."""
        with self._host.one_round():
            for m in range(self._count):
                result = first if m == 0 else self._resume(m)
                if isinstance(result, _Call):
                    raise PipelineError(
                        f"In {self._host.label}, the step calls network {result.network.name!r} for microbatch {m}, but"
                        " none for microbatch 0: use schedule='gpipe'."
                    )
                self._end(m, result)

    def close(self) -> None:
        """Leave steps that are still suspended, after an error."""
        for coroutine in self._coroutines:
            coroutine.close()


def _last_of_stages(table: Sequence[Action]) -> frozenset[Action]:
    """The last action of each stage that gives gradients of inputs, and the last that gives those of weights."""
    last: dict[tuple[str, int], Action] = {}
    for action in table:
        if action.kind != "F":
            last[action.kind, action.stage] = action
    return frozenset(last.values())


def loss_of(result: Any) -> Tensor | None:
    """The loss that a step returned."""
    loss = result.get("loss") if isinstance(result, dict) else result
    return loss if isinstance(loss, Tensor) else None


def join_results(results: Sequence[Any], sizes: Sequence[int]) -> Any:
    """What a step returned for each microbatch, as one result."""
    if all(result is None for result in results):
        return None
    if all(isinstance(result, dict) for result in results):
        keys = dict.fromkeys(key for result in results for key in result)
        return {key: _join([result.get(key) for result in results], sizes) for key in keys}
    return _join(results, sizes)


def _join(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    if all(isinstance(value, Tensor) for value in values):
        if all(value.dim() and value.shape[0] == size for value, size in zip(values, sizes, strict=True)):
            return torch.cat(list(values))
        if len({value.shape for value in values}) == 1 and values[0].numel() == 1:
            return combine(values, sizes)
    if all(isinstance(value, float) for value in values):
        return float(combine(values, sizes))
    present = [(value, size) for value, size in zip(values, sizes, strict=True) if value is not None]
    if len(present) < len(values) and present:
        return _join([value for value, _ in present], [size for _, size in present])
    return list(values)


def _detached(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.detach()
    if isinstance(result, dict):
        return {key: _detached(value) for key, value in result.items()}
    return result
