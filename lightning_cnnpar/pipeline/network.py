"""The collective network call: what the user's step calls instead of the network's own forward.

call ─► find the batch ─► program for these inputs ─► microbatches through the stages ─► outputs, the same on every rank
                                                                 ▲
loss.backward() ─────────────── gradients of the outputs ────────┘  drains the pipeline
"""

import dataclasses
import itertools
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_cnnpar import tree
from lightning_cnnpar._compat import keeps_graph, reaches_leaf
from lightning_cnnpar.mesh import Coordinates, Mesh
from lightning_cnnpar.partition.stage import Program
from lightning_cnnpar.pipeline.autograd import attach, share_gradient
from lightning_cnnpar.pipeline.batchnorm import DeferredStatistics
from lightning_cnnpar.pipeline.calls import Run
from lightning_cnnpar.pipeline.errors import PipelineError
from lightning_cnnpar.pipeline.exchange import Vocabulary
from lightning_cnnpar.pipeline.executor import Site
from lightning_cnnpar.pipeline.local import run_here
from lightning_cnnpar.pipeline.microbatch import find_batch, split_sizes
from lightning_cnnpar.pipeline.outputs import UnbatchedOutputError
from lightning_cnnpar.pipeline.prepared import Prepared
from lightning_cnnpar.pipeline.randomness import StageStreams, global_states, set_global_states
from lightning_cnnpar.pipeline.schedules import StepSchedule
from lightning_cnnpar.pipeline.stepping import NetworkStep
from lightning_cnnpar.pipeline.steps import StepRun
from lightning_cnnpar.pipeline.transport import Identity, Link

# Of calls that are under way while other calls of the step begin and end.
_STEP_CHANNEL = 1
# Sizes of the microbatches of a batch that is not cut, whatever it holds.
_WHOLE = (1,)


class Programs(Protocol):
    """Who cuts the network; `Partitioner` does."""

    def program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        """The program for these inputs and the network's present training flags."""


class GradientSync(Protocol):
    """What the pipeline tells the averaging of gradients over the replicas."""

    def begin_backward(self, passes: int = 1) -> None:
        """A backward pass through a network call begins; it runs autograd `passes` times on this rank."""

    def ready_enabled(self, enabled: bool) -> None:
        """Whether gradients that are accumulated from now on are the last ones of their parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """One network call: its inputs and how they are cut."""

    prepared: Prepared
    leaves: Sequence[Any]
    batch_size: int
    sizes: tuple[int, ...]
    identity: Identity
    statistics: DeferredStatistics


class PipelineNetwork:
    """A network that is cut into stages over the ranks of a replica.

    Args:
        root: The network with its original modules. Those of other ranks' stages are never called.
        partitioner: Cuts it.
        mesh: The grid.
        num_microbatches: Into how many microbatches a batch is cut, at most.
        name: For messages.
        gradient_sync: Told when gradients are complete; `None` without data parallelism.
        wire_dtype: Narrower type for floating-point values between stages.
        deferred_batch_norm: Update running statistics once per call, as from the whole batch.
        device: Where stages compute; where the first parameter is, by default.
        activation_checkpointing: Which microbatches compute their activations again: "never", "except_last", "always".
    """

    def __init__(
        self,
        root: nn.Module,
        partitioner: Programs,
        mesh: Mesh,
        *,
        num_microbatches: int,
        name: str,
        gradient_sync: GradientSync | None = None,
        wire_dtype: torch.dtype | None = None,
        deferred_batch_norm: bool = True,
        device: torch.device | None = None,
        activation_checkpointing: str = "never",
    ) -> None:
        self.num_microbatches = num_microbatches
        self.name = name
        self._root, self._partitioner, self._mesh = root, partitioner, mesh
        self._gradient_sync = gradient_sync
        self._deferred = deferred_batch_norm
        device = _device_of(root) if device is None else device
        self.streams = StageStreams(f"{name}/{mesh.data_rank}", device)
        self._site: Site | None = None
        if mesh.pipeline_size > 1:
            self._site = Site(
                root=root,
                link=Link(mesh, device),
                vocabulary=Vocabulary(),
                streams=self.streams,
                device=device,
                wire_dtype=wire_dtype,
                activation_checkpointing=activation_checkpointing,
            )
        self._prepared: dict[int, Prepared] = {}
        self._calls = 0
        self._outstanding: weakref.WeakSet[Run] = weakref.WeakSet()
        self._told: set[str] = set()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, label: str, whole: bool = False) -> Any:
        """Run the network. Every rank of the replica calls this, with the same inputs and in the same order.

        Args:
            args: Positional arguments of the network's forward.
            kwargs: Its keyword arguments.
            label: Where the user's code is, as in "training_step, batch 3".
            whole: Leave the batch uncut: it is a microbatch already.

        Returns:
            What the network's own forward would return, on every rank.

        Raises:
            CollectiveMismatchError: If the ranks are in different calls.
            PeerError: If a rank does not take part in time.
        """
        leaves, spec = tree.flatten((args, kwargs))
        prepared = self._prepare(self._partitioner.program(args, kwargs))
        batch_size, sizes = (1, _WHOLE) if whole else self._cut(leaves, spec, prepared)
        before = self._randomness() if len(sizes) > 1 else None
        try:
            outputs = self._run(self._call(prepared, leaves, batch_size, sizes, label))
        except UnbatchedOutputError as unbatched:
            assert before is not None
            self._set_randomness(before)
            prepared.whole = True
            self._tell(f"{unbatched}; only outputs with one entry per sample can be joined")
            outputs = self._run(self._call(prepared, leaves, batch_size, _WHOLE, label))
        return prepared.program.assemble(outputs, leaves)

    def open_step(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        label: str,
        schedule: StepSchedule,
        sizes: tuple[int, ...],
    ) -> NetworkStep:
        """Begin a step that calls the network once for each microbatch. Every rank of the replica does this.

        Args:
            args: Positional arguments of the call with the first microbatch.
            kwargs: Its keyword arguments.
            label: Where the user's code is.
            schedule: In which order stages run.
            sizes: Samples in each microbatch.
        """
        assert self._site is not None
        site = self._site
        prepared = self._prepare(self._partitioner.program(args, kwargs))
        program = prepared.program
        self._calls += 1
        table, routes, settled = prepared.step_routes(schedule, len(sizes))
        run = StepRun(
            site=site,
            identity=self._identify(label, sizes, _STEP_CHANNEL),
            num_outputs=program.num_outputs,
            routes=routes,
            table=table,
            settled=settled,
            sizes=sizes,
        )

        def share(index: int, gradient: Tensor | None, leaf: Tensor) -> Tensor | None:
            readers = prepared.readers.get(index, frozenset())
            with torch.no_grad(), site.link.guarded("share gradients of the network's inputs with"):
                return share_gradient(gradient, leaf, readers, self._mesh)

        return NetworkStep(
            run=run,
            program=program,
            find_program=self._partitioner.program,
            statistics=DeferredStatistics(prepared.batch_norms if self._deferred else (), len(sizes)),
            share=share,
        )

    @property
    def seconds_waited(self) -> float:
        """Time that this rank has spent waiting for other stages."""
        return 0.0 if self._site is None else self._site.link.seconds_waited

    def reset(self) -> None:
        """Forget calls whose backward has not run and will not: a step has ended."""
        self._outstanding.clear()

    def state_dict(self) -> dict[str, Any]:
        """State of the random number streams of this rank's stages."""
        return self.streams.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with the streams of `state_dict`."""
        self.streams.load_state_dict(state_dict)

    # --- forward

    def _call(
        self, prepared: Prepared, leaves: Sequence[Any], batch_size: int, sizes: tuple[int, ...], label: str
    ) -> _Call:
        self._calls += 1
        defer = self._deferred and len(sizes) > 1
        return _Call(
            prepared=prepared,
            leaves=leaves,
            batch_size=batch_size,
            sizes=sizes,
            identity=self._identify(label, sizes),
            statistics=DeferredStatistics(prepared.batch_norms if defer else (), len(sizes)),
        )

    def _run(self, call: _Call) -> Sequence[Tensor]:
        statistics, program = call.statistics, call.prepared.program
        with statistics.recording():
            if self._site is None:
                outputs: Sequence[Tensor] = run_here(
                    self._root, program, call.leaves, call.batch_size, call.sizes, statistics.begin
                )
            else:
                outputs = self._run_stages(self._site, call)
        statistics.update()
        return outputs

    def _run_stages(self, site: Site, call: _Call) -> Sequence[Tensor]:
        run = Run(
            site=site,
            identity=call.identity,
            program=call.prepared.program,
            routes=call.prepared.routes(len(call.sizes)),
            leaves=call.leaves,
            batch_size=call.batch_size,
            sizes=call.sizes,
        )
        run.forward(call.statistics.begin)
        outputs, differentiable = run.outputs.take(), run.outputs.requires_grad()
        if torch.is_grad_enabled() and any(differentiable):
            self._outstanding.add(run)
        inputs = {i: leaf for i, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor) and leaf.requires_grad}
        return attach(
            lambda gradients, anchor: self._drain(site, call, run, inputs, gradients, anchor),
            outputs,
            differentiable,
            list(inputs.values()),
        )

    def _identify(self, label: str, sizes: tuple[int, ...], channel: int = 0) -> Identity:
        grad = "inference" if torch.is_inference_mode_enabled() else "grad" if torch.is_grad_enabled() else "no_grad"
        mode = "train" if self._root.training else "eval"
        batch = "the batch whole" if sizes == _WHOLE else f"{sum(sizes)} samples in {len(sizes)} microbatches"
        facts = f"{mode}, {grad}, {batch}"
        return Identity(network=self.name, label=label, counter=self._calls, facts=facts, channel=channel)

    def _prepare(self, program: Program) -> Prepared:
        # By identity: the partitioner keeps its programs, and so does this.
        prepared = self._prepared.get(id(program))
        if prepared is None:
            rank, size = self._mesh.pipeline_rank, self._mesh.pipeline_size
            prepared = self._prepared[id(program)] = Prepared(program, self._root, rank, size)
        return prepared

    def _cut(self, leaves: Sequence[Any], spec: tree.TreeSpec, prepared: Prepared) -> tuple[int, tuple[int, ...]]:
        """Batch size and sizes of the microbatches."""
        if self.num_microbatches == 1 or prepared.whole:
            return 1, _WHOLE
        batch = find_batch(leaves, spec)
        if batch.size is None:
            self._tell(batch.reason)
            return 1, _WHOLE
        if not prepared.program.is_batched:
            self._tell(f"it does not run with another size of dimension 0 than {batch.size}, which can't be the batch")
            return 1, _WHOLE
        count = min(self.num_microbatches, batch.size)
        if count > 1 and batch.size < 2 * count and any(module.training for module in prepared.batch_norms):
            count = max(1, batch.size // 2)
            self._warn(
                "batch norm",
                f"A batch of {batch.size} samples in {self.num_microbatches} microbatches would leave single samples,"
                f" from which BatchNorm can't take statistics: network {self.name!r} uses {count} for it."
                f" Set `num_microbatches={count}`, use larger batches, or GroupNorm layers.",
            )
        return batch.size, split_sizes(batch.size, count)

    def _randomness(self) -> Any:
        return global_states(self.streams.device) if self._site is None else self.streams.snapshot()

    def _set_randomness(self, states: Any) -> None:
        if self._site is None:
            set_global_states(states, self.streams.device)
        else:
            self.streams.restore(states)

    def _tell(self, reason: str) -> None:
        self._warn(
            "whole",
            f"Network {self.name!r} runs each batch whole, not as {self.num_microbatches} microbatches: {reason}. The"
            f" numbers are right, but the stages can't overlap. Set `num_microbatches=1` if that is fine.",
        )

    def _warn(self, kind: str, message: str) -> None:
        """Once for each kind of advice, on one rank."""
        if kind not in self._told:
            self._told.add(kind)
            if self._mesh.coordinates == Coordinates(0, 0):
                warnings.warn(message, stacklevel=4)

    # --- backward

    def _drain(
        self,
        site: Site,
        call: _Call,
        run: Run,
        inputs: Mapping[int, Tensor],
        gradients: Sequence[Tensor | None],
        anchor: Tensor,
    ) -> list[Tensor | None]:
        """Backward through one call."""
        if torch.is_grad_enabled():
            raise PipelineError(
                f"`create_graph=True` asked for gradients of gradients through {call.identity.text}. A network that is"
                f" cut into stages gives first gradients only. Leave such terms (gradient penalties) out, or use"
                f" `pipeline_parallel_size=1`."
            )
        sync, parameters = self._gradient_sync, reaches_leaf(anchor)
        self._outstanding.discard(run)
        if sync is not None and parameters:
            sync.begin_backward(len(run.backward_actions))
            sync.ready_enabled(False)

        def before_last() -> None:
            if sync is not None and parameters and not self._outstanding:
                sync.ready_enabled(True)

        with call.statistics.ignoring():
            run.backward(gradients, keep=keeps_graph(), parameters=parameters, before_last=before_last)
        with torch.no_grad(), site.link.guarded("share gradients of the network's inputs with"):
            return [
                share_gradient(run.input_gradient(i), leaf, call.prepared.readers.get(i, frozenset()), self._mesh)
                for i, leaf in inputs.items()
            ]


def _device_of(root: nn.Module) -> torch.device:
    tensors = itertools.chain(root.parameters(), root.buffers())
    return next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))
