"""The Lightning strategy: what happens when, and who does it.

From the Trainer's first line to its last:

    Trainer(...)            sizes checked                                  config.resolve_sizes
    launch                  processes started                              launchers
    setup_environment       rank bound, process groups, failure watch      launchers.pinning, mesh, launchers.watch
    setup                   same weights and randomness, interception      mirror, strategies.networks
    first network call      the network is traced, cut and placed          partition, strategies.networks
    each step               microbatches flow, gradients are averaged      pipeline, data_parallel
    save / load             merged from the owners, a plain file           checkpoint.gather
    end of fit, teardown    every rank's module is whole again             strategies.networks
"""

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_cnnpar import _compat
from lightning_cnnpar.compression import CompressionEngine, CompressionPolicy, choose_compressor
from lightning_cnnpar.config import (
    STEP_SCHEDULES,
    Balance,
    ConfigurationError,
    HybridOptions,
    Numa,
    ScheduleName,
    Size,
    StartMethod,
    resolve_sizes,
)
from lightning_cnnpar.data_parallel.comm_hook import CompressedReduce
from lightning_cnnpar.data_parallel.elementwise import is_elementwise
from lightning_cnnpar.data_parallel.sync_batchnorm import (
    convert_sync_batchnorm,
    revert_sync_batchnorm,
    set_statistics_group,
)
from lightning_cnnpar.launchers.launch import make_launcher
from lightning_cnnpar.launchers.pinning import announce, bind_rank
from lightning_cnnpar.launchers.preempted import Preempted
from lightning_cnnpar.launchers.watch import FailureWatch
from lightning_cnnpar.mesh import DEFAULT_TIMEOUT, Coordinates, create_data_group, create_mesh, create_world_group
from lightning_cnnpar.metrics import TimeSplit
from lightning_cnnpar.mirror import share_randomness
from lightning_cnnpar.partition.ownership import canonical_names, named_tensors
from lightning_cnnpar.plan import ParallelPlan
from lightning_cnnpar.plugins.precision import HybridPrecision
from lightning_cnnpar.strategies.checkpoints import CheckpointStrategy
from lightning_cnnpar.strategies.collectives import (
    clip_grad_norm_over_stages,
    gather_metrics_over_data,
    use_mesh,
)
from lightning_cnnpar.strategies.compression_log import CompressionLog
from lightning_cnnpar.strategies.fitting import (
    activation_bytes,
    smallest_fitting_pipeline,
    training_bytes,
    usable_memory,
)
from lightning_cnnpar.strategies.held_gradients import HeldGradients
from lightning_cnnpar.strategies.loaders import distribute_loader
from lightning_cnnpar.strategies.microbatch_steps import MicrobatchSteps
from lightning_cnnpar.strategies.networks import Networks
from lightning_cnnpar.strategies.preemption import Preemption
from lightning_cnnpar.strategies.scheduling import Situation, choose_checkpointing, choose_schedule
from lightning_cnnpar.strategies.step_times import StepTimes
from lightning_cnnpar.strategies.whole_weights import (
    WholeWeights,
    compare_as_before,
    compare_whole_values,
    module_copies,
    modules_of_callbacks,
)

__all__ = ["HybridStrategy"]


class HybridStrategy(CheckpointStrategy):
    """Pipeline parallelism inside a replica, data parallelism between replicas, for an unmodified `LightningModule`.

    Args:
        pipeline_parallel_size: P, over how many ranks a network is cut. "auto" takes 1 if the model fits a device, else
            the smallest divisor of a node's devices over which it fits.
        data_parallel_size: D, the number of replicas. "auto" takes what is left. P x D is the number of ranks.
        schedule: Order of microbatches. "gpipe": the step runs once on the whole batch, exact for any loss. "1f1b",
            "interleaved_1f1b", "zero_bubble": the step runs once for each microbatch, as with gradient accumulation, so
            that few microbatches are alive at once. "auto": "gpipe" if its activations fit, and says why.
        num_microbatches: M, into how many microbatches a batch is cut; "auto" is 2 P for P > 1, else 1. A batch with
            fewer samples is cut in fewer.
        stages_per_rank: V, stages of each rank, for "interleaved_1f1b" and "zero_bubble".
        network: Dotted name of the submodule to cut; `None` cuts what the step calls.
        cut_points: Names of modules that start a new stage; `None` balances.
        balance: What stages are balanced by: "flops", "time" (estimated from operations), "memory", "parameters", or
            relative speeds of the ranks.
        activation_checkpointing: Which microbatches drop their activations and compute them again for the backward:
            "never", "except_last", "always", or "auto": "except_last" if they don't fit otherwise.
        deferred_batch_norm: Update BatchNorm's running statistics once a batch, as the unsplit batch would.
        zero_stage: What is cut over the replicas of a stage: 1 optimizer states, 2 also gradients, 3 also parameters.
            0 keeps a copy of all on every replica.
        compression: Compression of gradients between replicas: "bf16", "int8", "int4", "int2", "onebit", "topk",
            "powersgd", a `Compressor`, a dictionary of name patterns or of steps; "auto" measures whether it pays;
            `None` sends them as they are.
        numa: Binding of ranks to the NUMA nodes of their devices: "auto" is `NumaBinding()`, "off" binds nothing.
        process_group_backend: Backend of `torch.distributed`; `None` chooses by device.
        timeout: How long a collective may take.
        start_method: How ranks start: "popen", "spawn", "fork", "forkserver".
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: How checkpoints are written; by default atomically.
        precision_plugin: Set by the Trainer.

    Raises:
        ConfigurationError: For values that can't work, with the values and what to change.
    """

    strategy_name = "cnnpar_hybrid"

    def __init__(
        self,
        pipeline_parallel_size: Size = "auto",
        data_parallel_size: Size = "auto",
        *,
        schedule: ScheduleName = "gpipe",
        num_microbatches: Size = "auto",
        stages_per_rank: int = 1,
        network: str | None = None,
        cut_points: list[str] | None = None,
        balance: Balance = "flops",
        activation_checkpointing: str = "never",
        deferred_batch_norm: bool = True,
        zero_stage: int = 0,
        compression: Any = None,
        numa: Numa = "auto",
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        start_method: StartMethod = "popen",
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.options = HybridOptions(
            pipeline_parallel_size=pipeline_parallel_size,
            data_parallel_size=data_parallel_size,
            schedule=schedule,
            num_microbatches=num_microbatches,
            stages_per_rank=stages_per_rank,
            network=network,
            cut_points=None if cut_points is None else tuple(cut_points),
            balance=balance,
            activation_checkpointing=activation_checkpointing,
            deferred_batch_norm=deferred_batch_norm,
            zero_stage=zero_stage,
            compression=compression,
            numa=numa,
        )
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method = start_method
        self._watch: FailureWatch | None = None
        self._policy = None if compression in (None, "auto") else CompressionPolicy.of(compression)
        self._compression: CompressedReduce | None = None
        self._use_sampler = True
        self._times: StepTimes | None = None
        self._comparing: list[Any] = []
        self._steps: MicrobatchSteps | None = None
        self._held: HeldGradients | None = None

    @property
    def plan(self) -> ParallelPlan:
        """The layout, with the stages of the networks called so far."""
        if self._networks is not None:
            return self._networks.plan()
        return ParallelPlan(pipeline_parallel_size=self.mesh.pipeline_size, data_parallel_size=self.mesh.data_size)

    @property
    def compression_engine(self) -> CompressionEngine | None:
        """What compresses gradients during a run with compression: its `statistics`, its `residuals`."""
        return None if self._compression is None else self._compression.engine

    @property
    def time_split(self) -> TimeSplit:
        """Where the time of training steps went on this rank, in this or the last `fit`; the first two don't count."""
        return TimeSplit() if self._times is None else self._times.split

    # ---- launch ------------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        self._check_sizes()
        self._launcher = make_launcher(self, self._start_method)

    def _check_sizes(self) -> tuple[int, int]:
        return resolve_sizes(
            self.options.pipeline_parallel_size,
            self.options.data_parallel_size,
            devices_per_node=self.num_processes,
            num_nodes=self.num_nodes,
        )

    def check_before_launch(self) -> None:
        """Refuse what can be seen to fail before processes start; the launcher calls this."""
        module = self.lightning_module
        if module is not None and self.options.schedule in STEP_SCHEDULES and not module.automatic_optimization:
            raise ConfigurationError(
                f"schedule={self.options.schedule!r} runs the step once for each microbatch, but"
                f" {type(module).__name__} steps its optimizers itself (automatic_optimization=False). Use"
                " schedule='gpipe', which runs the step once."
            )
        pipeline_size, _ = self._check_sizes()
        if module is None or pipeline_size == 1:
            return
        layers = sum(1 for submodule in module.modules() if any(True for _ in submodule.parameters(recurse=False)))
        if 0 < layers < pipeline_size:
            raise ConfigurationError(
                f"pipeline_parallel_size={pipeline_size}, but {type(module).__name__} has only {layers} modules with"
                f" parameters: there can be at most {layers} stages. Use pipeline_parallel_size={layers} or less."
            )

    def describe_rank(self, local_rank: int) -> str:
        """Rank, replica and stage of a process of this node, in words; also before the grid exists."""
        rank = self.node_rank * self.num_processes + local_rank
        if self._mesh is None and self.options.pipeline_parallel_size == self.options.data_parallel_size == "auto":
            return f"rank {rank}"
        size = self._check_sizes()[0] if self._mesh is None else self.mesh.pipeline_size
        place = Coordinates.of(rank, size)
        return f"rank {rank} (replica {place.data}, stage rank {place.pipeline})"

    def setup_environment(self) -> None:
        """Bind the rank to its node, start the process group and the grid."""
        assert self.accelerator is not None
        bound = bind_rank(self)
        self.accelerator.setup_device(self.root_device)
        _compat.start_process_group(self, self._timeout)
        if self.options.numa != "off":
            announce(bound)
        if self._mesh is None:
            pipeline_size, data_size = self._resolve_sizes()
            self._mesh = create_mesh(data_size, pipeline_size, timeout=self._timeout)
        use_mesh(self.mesh)
        set_statistics_group(self.mesh.statistics_group)
        if self.options.compression is not None and self._compression is None:
            self._compression = self._make_compression()
        if self.mesh.world_size > 1:
            self._watch = FailureWatch(
                f"replica {self.mesh.data_rank}, stage rank {self.mesh.pipeline_rank}", _compat.next_run_number()
            )

    def _make_compression(self) -> CompressedReduce | None:
        if self.mesh.data_size == 1:
            rank_zero_warn(
                f"compression={self.options.compression!r} has nothing to compress: with data_parallel_size=1 no"
                " gradients travel."
            )
            return None
        group, policy = create_data_group(self.mesh), self._policy
        if policy is None:
            chosen, why = choose_compressor(group, self.root_device)
            rank_zero_info(why)
            if chosen is None:
                return None
            policy = CompressionPolicy.of(chosen)
        return CompressedReduce(
            CompressionEngine(policy, group=group, device=self.root_device, loss_scale=self._loss_scale)
        )

    def _loss_scale(self) -> float:
        scaler = getattr(self.precision_plugin, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())

    def on_overflow(self, flag: Tensor) -> None:
        """Take the residuals of a skipped step back."""
        if self._compression is not None and bool(flag):
            self._compression.engine.take_back()

    def _resolve_sizes(self) -> tuple[int, int]:
        smallest = 1
        if self.options.pipeline_parallel_size == "auto" and self.options.data_parallel_size == "auto":
            assert self.lightning_module is not None
            smallest = self.broadcast(
                smallest_fitting_pipeline(self.lightning_module, self.root_device, self.num_processes)
            )
        return resolve_sizes(
            self.options.pipeline_parallel_size,
            self.options.data_parallel_size,
            devices_per_node=self.num_processes,
            num_nodes=self.num_nodes,
            smallest_pipeline=smallest,
        )

    @property
    def num_microbatches(self) -> int:
        """M, with "auto" resolved."""
        if self.options.num_microbatches != "auto":
            return int(self.options.num_microbatches)
        return 2 * self.mesh.pipeline_size if self.mesh.pipeline_size > 1 else 1

    # ---- setup -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Prepare module, precision, optimizers and interception for one run of the Trainer."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        module = self.lightning_module
        if fitting and self._layer_sync is not None and self.mesh.data_size > 1:
            convert_sync_batchnorm(module)
        precision = self.precision_plugin
        if isinstance(precision, HybridPrecision):
            precision.attach(self, self.root_device)
        self.model = precision.convert_module(module)
        self.model_to_device()
        self._same_weights_everywhere(module)
        for holder in (module, *modules_of_callbacks(trainer.callbacks)):
            gather_metrics_over_data(holder)
        _compat.count_data_parallel_only(trainer, self.mesh.data_size)
        self._use_sampler = _compat.take_over_samplers(trainer)
        if self.mesh.world_size > 1:
            share_randomness(self.mesh)
        if fitting:
            self.setup_optimizers(trainer)
            self._check_optimizers()
        self.setup_precision_plugin()
        if fitting:
            _compat.optimizers_to_device(self.optimizers, self.root_device)
        self._distribute(trainer, fitting)

    def _distribute(self, trainer: Any, fitting: bool) -> None:
        precision = self.precision_plugin
        module = self.lightning_module
        assert module is not None
        options = self._resolve_auto(module)
        self._networks = Networks(
            module,
            mesh=self.mesh,
            options=options,
            num_microbatches=self.num_microbatches,
            device=self.root_device,
            copies=lambda: module_copies(trainer.callbacks, module),
            optimizers=self._plain_optimizers,
            wire_dtype=getattr(precision, "wire_dtype", None),
            announce=rank_zero_info,
            hook=self._compression,
        )
        if fitting and self.options.zero_stage > 0 and self.mesh.data_size == 1:
            rank_zero_warn(
                f"zero_stage={self.options.zero_stage} has nothing to cut: there is one replica"
                " (data_parallel_size=1). The run goes on as with zero_stage=0."
            )
        self._networks.install(reduce_gradients=fitting)
        self._steps = self._networks.steps = self._microbatch_steps(self._networks, options) if fitting else None
        if fitting and self.mesh.world_size > 1:
            self._times = StepTimes(self._networks.waits)
            trainer.callbacks.append(self._times)
            if self._compression is not None:
                trainer.callbacks.append(CompressionLog(self._compression.engine))
        if fitting and (self.mesh.pipeline_size > 1 or self._is_sharded):
            trainer.callbacks[:0] = [WholeWeights(self._networks.make_whole)]
        if fitting:
            # Behind the user's callbacks: at the end of a batch, all of them have seen it.
            trainer.callbacks.append(Preemption(create_world_group(self.mesh), self.describe_rank(self.local_rank)))
        if fitting and self._is_sharded and self.options.zero_stage == 3:
            self._comparing = compare_whole_values(trainer.callbacks, self._networks.whole_values)

    def _resolve_auto(self, module: Any) -> HybridOptions:
        """The options of this run, on all ranks alike."""
        options = self.options
        if "auto" not in (options.schedule, options.activation_checkpointing):
            return options
        situation = Situation(
            pipeline_size=self.mesh.pipeline_size,
            num_microbatches=self.num_microbatches,
            steps_itself=not module.automatic_optimization,
            parameter_bytes=training_bytes(module),
            activation_bytes=activation_bytes(module),
            available_bytes=usable_memory(self.root_device, self.num_processes),
        )
        schedule, checkpointing, why = options.schedule, options.activation_checkpointing, []
        if schedule == "auto":
            schedule, reason = choose_schedule(situation)
            why.append(reason)
        if checkpointing == "auto":
            checkpointing, reason = choose_checkpointing(situation, schedule)
            why.append(reason)
        rank_zero_info("\n".join(why))
        schedule, checkpointing = self.broadcast((schedule, checkpointing))
        return dataclasses.replace(options, schedule=schedule, activation_checkpointing=checkpointing)

    def _microbatch_steps(self, networks: Networks, options: HybridOptions) -> MicrobatchSteps | None:
        schedule = options.schedule
        if schedule not in STEP_SCHEDULES or self.num_microbatches == 1:
            return None
        return MicrobatchSteps(
            self.lightning_module,
            networks,
            schedule=schedule,  # type: ignore[arg-type]
            num_microbatches=self.num_microbatches,
            device=self.root_device,
            deferred_batch_norm=self.options.deferred_batch_norm,
            backward=self._microbatch_backward,
            warn=rank_zero_warn,
        )

    def _plain_optimizers(self) -> list[torch.optim.Optimizer]:
        return list(self.optimizers)

    def _same_weights_everywhere(self, module: nn.Module) -> None:
        """Every rank starts from the weights of rank 0, as users may not have seeded their initialisation."""
        if self.mesh.world_size == 1:
            return
        for _, tensor in named_tensors(module):
            dist.broadcast(tensor.data, src=0)

    def _check_elementwise(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._is_sharded:
            return
        name = type(optimizer).__name__
        fits = False if isinstance(optimizer, torch.optim.LBFGS) else is_elementwise(optimizer)
        if fits is False:
            raise ConfigurationError(
                f"zero_stage={self.options.zero_stage} gives each replica a part of the elements of a parameter, and"
                f" {name} does not treat every element alike: on parts it would compute something else. Use"
                f" zero_stage=0, or an optimizer that does (SGD, Adam, AdamW, RMSprop, ...)."
            )
        if fits is None:
            rank_zero_warn(
                f"{name} could not be tried on parts of a parameter. With zero_stage={self.options.zero_stage} its"
                " result is only right if it treats every element alike, as SGD and Adam do."
            )

    @property
    def _is_sharded(self) -> bool:
        """Whether this run cuts anything over replicas."""
        return self.options.zero_stage > 0 and self.mesh.data_size > 1

    def _check_optimizers(self) -> None:
        momentum = 0.0 if self._policy is None else self._policy.momentum
        for optimizer in self.optimizers if momentum else []:
            if any(group.get("momentum") for group in optimizer.param_groups):
                raise ConfigurationError(
                    f"TopK(momentum={momentum}) gives gradients a momentum before they are chosen, and"
                    f" {type(optimizer).__name__}(momentum={optimizer.param_groups[0]['momentum']}) would give them"
                    " another: use momentum=0 in one of the two."
                )
        if self.mesh.pipeline_size == 1 and not self._is_sharded:
            return
        for optimizer in self.optimizers:
            self._check_elementwise(optimizer)
            if isinstance(optimizer, torch.optim.LBFGS) and self.mesh.pipeline_size > 1:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} calls its closure several times in a step and combines all gradients,"
                    f" which are on {self.mesh.pipeline_size} ranks: use pipeline_parallel_size=1, or an optimizer that"
                    f" updates each parameter from its own gradient (SGD, AdamW, ...)."
                )

    def model_to_device(self) -> None:
        """Move the module to this rank's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    @property
    def precision_plugin(self) -> Precision:
        """The precision, made right over stages."""
        if self._precision_plugin is None:
            self._precision_plugin = HybridPrecision.around(Precision())
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else HybridPrecision.around(precision_plugin)

    def process_dataloader(self, dataloader: object) -> object:
        """One replica, one loader: shard over replicas, mirror inside them."""
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        stage = _compat.loader_stage(default=str(getattr(getattr(trainer, "state", None), "stage", None) or "train"))
        return distribute_loader(dataloader, self.mesh, stage=stage, use_sampler=self._use_sampler)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's training step on this rank."""
        if self._networks is not None:
            self._networks.reset_step()
            self._networks.begin_step()
        self._held = None
        with self._in_step("training_step", args):
            steps, trainer = self._steps, getattr(self.lightning_module, "_trainer", None)
            if steps is None or trainer is None or not _compat.backward_follows(trainer):
                return super().training_step(*args, **kwargs)
            batch, *rest = args or tuple(kwargs.values())
            cut = steps.cut(batch)
            if len(cut.parts) == 1:
                return super().training_step(*args, **kwargs)
            self._held = HeldGradients(self.lightning_module, zeroed=_compat.zero_grad_follows(trainer))
            with self._held.collecting():
                return steps.run(cut, lambda part: super(HybridStrategy, self).training_step(part, *rest))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's validation step on this rank."""
        with self._in_step("validation_step", args), self._evaluating():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's test step on this rank."""
        with self._in_step("test_step", args), self._evaluating():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's predict step on this rank."""
        with self._in_step("predict_step", args), self._evaluating():
            return super().predict_step(*args, **kwargs)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        if self._networks is None:
            yield
            return
        self._networks.begin_evaluation()
        yield
        self._networks.end_step()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step the optimizer: with `zero_stage`, on this rank's pieces, from the end of the closure on."""
        networks = self._networks
        if networks is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def closure_to_pieces() -> Any:
            result = closure()
            networks.before_update()
            return result

        networks.before_update()
        output = super().optimizer_step(optimizer, closure_to_pieces, model, **kwargs)
        networks.end_step()
        return output

    def _in_step(self, name: str, args: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        if self._networks is None:
            return contextlib.nullcontext()
        index = next((arg for arg in args[1:2] if isinstance(arg, int)), None)
        return self._networks.step(name if index is None else f"{name}, batch {index}")

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass of the user's step."""
        if self._networks is not None and kwargs.get("inputs") is not None:
            inputs = kwargs["inputs"]
            self._networks.refuse_chosen_inputs([inputs] if isinstance(inputs, Tensor) else inputs)
        if self._held is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        # The microbatches' losses have run backward already.
        assert self.lightning_module is not None
        held, self._held = self._held, None
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        held.give_back()
        return self.precision_plugin.post_backward(loss, self.lightning_module)

    def _microbatch_backward(self, loss: Tensor, keep: bool) -> None:
        """Run a microbatch's share of the loss backward."""
        module = self.lightning_module
        assert module is not None
        loss = loss / module.trainer.accumulate_grad_batches
        scaler = getattr(self.precision_plugin, "scaler", None)
        loss = loss if scaler is None else scaler.scale(loss)
        if keep:
            module.backward(loss, retain_graph=True)
        else:
            module.backward(loss)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Be ready to reduce gradients."""
        if self._networks is not None:
            self._networks.expect_backward()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients without reducing them."""
        if self._networks is None:
            yield
            return
        with self._networks.no_sync():
            yield

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` with the norm over all stages of the network.

        Args:
            parameters: Such as `self.parameters()`; those of other stages count with their owners' gradients.
            max_norm: Largest 2-norm allowed.

        Returns:
            The norm before clipping. Every rank of a replica calls this and gets the same value.
        """
        parameters = list(parameters)
        networks = self._networks
        if networks is None or (self.mesh.pipeline_size == 1 and not self._is_sharded):
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        assert self.lightning_module is not None
        networks.before_update()
        names = canonical_names(self.lightning_module)
        owner = networks.ownership.owner
        return clip_grad_norm_over_stages(
            parameters,
            max_norm,
            mesh=self.mesh,
            is_staged=lambda parameter: owner(names.get(id(parameter), "")) is not None,
            is_piece=None if networks.pieces is None else networks.pieces.is_piece,
            device=self.root_device,
        )

    @contextlib.contextmanager
    def whole_module(self) -> Iterator[nn.Module]:
        """The LightningModule with the weights of all stages, to export it, draw its graph or read weights.

        Every rank enters the context, since the weights come from all of them; inside, network calls run on this rank
        alone. Yields the module.
        """
        if self._networks is None:
            assert self.lightning_module is not None
            yield self.lightning_module
            return
        with self._networks.whole() as module:
            yield module

    # ---- end ---------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks, or learn which one failed first."""
        if self._watch is None:
            return
        if isinstance(exception, Preempted):
            self._watch.close()
            return
        first = self._watch.report(exception)
        if first is None:
            exception.add_note(f"It was raised on {self.describe_rank(self.local_rank)}.")
        else:
            exception.add_note(f"This rank stopped because {first.brief}")

    def teardown(self) -> None:
        """Give every rank the whole module on CPU and release devices."""
        trainer = getattr(self.lightning_module, "_trainer", None)
        # A later validation or test has nothing to say of the training before it.
        fitted = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if fitted and (advice := self.time_split.advice()) is not None:
            rank_zero_warn(advice)
        if self._networks is not None:
            if self._may_communicate():
                self._networks.make_whole()
            else:
                self._networks.abandon()
        compare_as_before(self._comparing)
        self._comparing = []
        if trainer is not None:
            ours = (WholeWeights, Preemption, StepTimes, CompressionLog)
            trainer.callbacks[:] = [callback for callback in trainer.callbacks if not isinstance(callback, ours)]
            _compat.give_back_samplers(trainer, self._use_sampler)
        if self.lightning_module is not None and self._layer_sync is not None:
            revert_sync_batchnorm(self.lightning_module)
        if self._watch is not None:
            if self._may_communicate():
                # Rank 0 keeps the store of the watch: nobody leaves before all are done with it.
                self.barrier("teardown")
            self._watch.close()
            self._watch = None
        if self._compression is not None:
            self._compression.engine.close()
            self._compression = None
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        # Process groups and threads belong to this process; a copy starts without them.
        state = super().__getstate__()
        state.update(_mesh=None, _networks=None, _watch=None, _times=None, _compression=None, _comparing=[])
        state.update(_steps=None, _held=None)
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> "HybridStrategy":
        import copy

        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied
