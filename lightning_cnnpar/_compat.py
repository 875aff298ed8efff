"""Every private name of torch and Lightning that this package uses, each with the version it was checked on.

Nothing else in the package may touch a name that starts with an underscore in another project.
"""

import contextlib
import copy
import functools
import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

# The base of modes that see every operator; documented, but its home has an underscore (torch 2.14).
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def disable_torch_function() -> Any:
    """Context in which tensor subclasses behave as plain tensors (torch 2.14; also in the public extension notes)."""
    return torch._C.DisableTorchFunctionSubclass()


def in_backward() -> bool:
    """Whether this thread is inside a backward pass (torch 2.14)."""
    return torch._C._current_graph_task_id() != -1


def overflow_flag(scaler: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> torch.Tensor:
    """The tensor in which a `GradScaler` keeps whether it met a non-finite gradient (torch 2.14).

    It is created with 0 where the optimizer had no gradient on this rank, since `step` insists on a recorded check.
    """
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    if device not in found:
        found[device] = next(iter(found.values()), torch.zeros((), device=device))
    flag: torch.Tensor = found[device]
    return flag


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward pass that this thread is in has ended (torch 2.14).

    The engine holds the only reference that this makes, and drops it without a call when the pass fails.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def copy_tensors(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into the target beside it, in few kernels (torch 2.14)."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def tensor_slots(module: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Every place of a module tree that holds a parameter or buffer, tied ones once for each place (torch 2.14)."""
    for submodule in module.modules():
        for store in (submodule._parameters, submodule._buffers):
            for key, tensor in list(store.items()):
                if tensor is not None:
                    yield store, key, tensor


def caller_metric_name() -> str | None:
    """Key of the logged metric on whose behalf Lightning is reducing, read off the call stack (Lightning 2.6)."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if type(owner).__name__ == "_ResultMetric":
            return str(owner.meta.name)
        frame = frame.f_back
    return None


def loader_stage(default: str) -> str:
    """For which stage ("train", "validate", "sanity_check", "test", "predict") Lightning sets up a loader.

    The strategy's hook isn't told, so it is read off the call stack (Lightning 2.6).
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_process_dataloader":
            return str(frame.f_locals["stage"].value)
        frame = frame.f_back
    return default


def private_store() -> Any:
    """A connection of its own to the store of the default process group, for use by another thread (torch 2.14)."""
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        return store


def module_buffers(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """The dictionary in which a module keeps its buffers (torch 2.14)."""
    return module._buffers


def increment_tensors(tensors: Sequence[Tensor]) -> None:
    """Add 1 to each tensor, in few kernels (torch 2.14)."""
    if tensors:
        torch._foreach_add_(list(tensors), 1)


def interpolate_tensors(targets: Sequence[Tensor], sources: Sequence[Tensor], weight: float) -> None:
    """Move each target to the source beside it by `weight`, in few kernels (torch 2.14)."""
    if targets:
        torch._foreach_lerp_(list(targets), list(sources), weight)


def keeps_graph() -> bool:
    """Whether the backward pass that this thread is in was asked to retain its graph (torch 2.14)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def reaches_leaf(leaf: Tensor) -> bool:
    """Whether the backward pass that this thread is in accumulates into `leaf` (torch 2.14).

    False for a leaf that `torch.autograd.grad` or `backward(inputs=...)` was not asked for.
    """
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    return torch._C._will_engine_execute_node(node)


def is_index_recorder(batch_sampler: Any) -> bool:
    """Whether this is what Lightning puts around a batch sampler to note which samples it predicts (Lightning 2.6)."""
    return type(batch_sampler).__name__ == "_IndexBatchSamplerWrapper" and hasattr(batch_sampler, "_batch_sampler")


def with_recorded_sampler(recorder: Any, replace: Callable[[Any], Any]) -> Any:
    """A copy of an index recorder around what `replace` makes of its batch sampler (Lightning 2.6)."""
    copied = copy.copy(recorder)
    copied._batch_sampler = replace(recorder._batch_sampler)
    return copied


# Lightning is imported inside the functions below: everything under the strategies works without it.

_run_number = itertools.count(1)


def subprocess_script_launcher() -> Any:
    """Lightning's launcher that runs the script once for each rank (Lightning 2.6)."""
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

    return _SubprocessScriptLauncher


def multi_processing_launcher() -> Any:
    """Lightning's launcher that starts processes (Lightning 2.6)."""
    from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher

    return _MultiProcessingLauncher


def start_process_group(strategy: Any, timeout: Any) -> None:
    """Set ranks and start `torch.distributed` as Lightning's own strategies do (Lightning 2.6).

    One process needs no process group, so none is started for it.
    """
    from lightning.fabric.utilities.distributed import (
        _get_default_process_group_backend_for_device,
        _init_dist_connection,
    )
    from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    environment = strategy.cluster_environment
    if environment is not None:
        environment.set_global_rank(strategy.node_rank * strategy.num_processes + strategy.local_rank)
        environment.set_world_size(strategy.num_nodes * strategy.num_processes)
    for gate in (rank_zero_only, fabric_rank_zero_only):
        gate.rank = strategy.global_rank  # type: ignore[attr-defined]
    if strategy.num_nodes * strategy.num_processes == 1:
        return
    device = strategy.root_device
    backend = strategy.process_group_backend or _get_default_process_group_backend_for_device(device)
    more: dict[str, Any] = {"timeout": timeout, "device_id": device if device.type != "cpu" else None}
    if strategy.num_nodes == 1 and _meets_on_loopback(environment) and not dist.is_initialized():
        more["store"] = _loopback_store(environment, timeout)
        if any(name == "lo" for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _init_dist_connection(environment, backend, **more)


def _meets_on_loopback(environment: Any) -> bool:
    # torchrun serves a store of its own.
    return environment.main_address in ("127.0.0.1", "localhost") and "TORCHELASTIC_RUN_ID" not in os.environ


def _loopback_store(environment: Any, timeout: Any) -> Any:
    """The store that ranks of one machine meet at; torch's own would listen on all interfaces (torch 2.14)."""
    address, port, size = "127.0.0.1", environment.main_port, environment.world_size()
    if environment.global_rank() != 0:
        return dist.TCPStore(address, port, size, False, timeout, wait_for_workers=False)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(4096)
    return dist.TCPStore(
        address, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )


def next_run_number() -> int:
    """Counts the runs of this process; the same on all ranks, which run the same script."""
    return next(_run_number)


def count_data_parallel_only(trainer: Any, data_size: int) -> None:
    """Let Lightning's `ThroughputMonitor` count each sample once, not once for each stage (Lightning 2.6)."""
    from lightning.pytorch.callbacks import ThroughputMonitor

    for callback in trainer.callbacks:
        if isinstance(callback, ThroughputMonitor):
            for throughput in callback._throughputs.values():
                throughput.world_size = data_size


def take_over_samplers(trainer: Any) -> bool:
    """Keep Lightning from injecting samplers, and tell whether the user wanted that it does (Lightning 2.6)."""
    connector = trainer._accelerator_connector
    wanted = bool(connector.use_distributed_sampler)
    connector.use_distributed_sampler = False
    return wanted


def give_back_samplers(trainer: Any, wanted: bool) -> None:
    """Undo `take_over_samplers` (Lightning 2.6)."""
    trainer._accelerator_connector.use_distributed_sampler = wanted


def is_between_steps(trainer: Any, batch_idx: int) -> bool:
    """Whether the optimizer has stepped after this batch, so that no gradients wait, and more batches follow (2.6)."""
    if trainer.is_last_batch:
        return False
    automatic = trainer.lightning_module.automatic_optimization
    return not automatic or (batch_idx + 1) % trainer.accumulate_grad_batches == 0


def ignore_signals(trainer: Any, numbers: Sequence[int]) -> None:
    """Ignore signals from now on, also after Lightning gives handlers back at its end (2.6)."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
        trainer._signal_connector._original_handlers[signal.Signals(number)] = signal.SIG_IGN


def preemption_path(trainer: Any) -> str:
    """Where a checkpoint goes that the next start should find (2.6).

    `last.ckpt` beside those of the first `ModelCheckpoint`, for `ckpt_path="last"`; without one, and under SLURM, the
    file that Lightning takes for `ckpt_path="hpc"`.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    callback = next((c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)), None)
    if callback is None or callback.dirpath is None or SLURMEnvironment.detect():
        return str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))
    # Joined as text: it may be a URL.
    return f"{callback.dirpath}/{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}"


def zero_grad_follows(trainer: Any) -> bool:
    """Whether Lightning zeroes gradients between this training step and its backward (2.6)."""
    loop = trainer.fit_loop.epoch_loop
    optimization = loop.automatic_optimization
    return not optimization._skip_backward and loop.batch_idx % trainer.accumulate_grad_batches == 0


def backward_follows(trainer: Any) -> bool:
    """Whether a backward comes after this training step; none does while statistics are only updated (2.6)."""
    return not trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward


def metric_step_value(metric: Any) -> Any:
    """What a torchmetrics metric found in its last `forward` (1.8); `None` if it was only updated."""
    return metric._forward_cache


def set_metric_step_value(metric: Any, value: Any) -> None:
    """Change what Lightning logs for a metric on a step."""
    metric._forward_cache = value


def optimizers_to_device(optimizers: Any, device: torch.device) -> None:
    """Move the states of optimizers (Lightning 2.6)."""
    from lightning.fabric.utilities.optimizer import _optimizers_to_device

    _optimizers_to_device(optimizers, device)


def complete_wrapping_checkpoint_io(io: Any, make: Callable[[], Any]) -> None:
    """Give a checkpoint plugin that wraps another one something to wrap, where it has nothing (Lightning 2.6)."""
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

    if isinstance(io, _WrappingCheckpointIO) and io.checkpoint_io is None:
        io.checkpoint_io = make()


def sync_batch_norm(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    factor: float,
    group: Any,
) -> Tensor:
    """The function behind `torch.nn.SyncBatchNorm.forward`, for devices that have its kernels (torch 2.14)."""
    size = torch.distributed.get_world_size(group)
    output: Tensor = torch.nn.modules._functions.SyncBatchNorm.apply(
        values, weight, bias, running_mean, running_var, eps, factor, group, size
    )
    return output


def fake_tensor_mode() -> Any:
    """Mode in which tensors have shapes, dtypes and devices but no memory (torch 2.14)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor was made in a fake-tensor mode (torch 2.14)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors that share memory, also without data; valid while one of them lives (torch 2.14)."""
    key: int = tensor.untyped_storage()._cdata
    return key


def tensor_version(tensor: Tensor) -> int:
    """How often the memory of a tensor was written in place (torch 2.14)."""
    return 0 if tensor.is_inference() else tensor._version


def module_hooks(module: torch.nn.Module) -> list[Any]:
    """The forward hooks and forward pre-hooks of a module itself (torch 2.14)."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


@contextlib.contextmanager
def intercepted_checkpointing(decide: Callable[..., Any]) -> Iterator[None]:
    """Let `decide(original, function, args, kwargs, options)` carry out torch's `checkpoint` (torch 2.14).

    Before 2.14 nothing is intercepted.
    """
    from torch.utils import checkpoint as home

    original = getattr(home, "_checkpoint_impl", None)
    if original is None:
        yield
        return

    def checkpoint(function: Any, args: Any, kwargs: Any, **options: Any) -> Any:
        return decide(original, function, args, kwargs, options)

    with mock.patch.object(home, "_checkpoint_impl", checkpoint):
        yield


@contextlib.contextmanager
def checked_autograd_functions(check: Callable[[Any], None]) -> Iterator[None]:
    """Call `check` with the arguments of each `torch.autograd.Function.apply`, before its forward runs (torch 2.14).

    `apply` is compiled and bound wherever users keep it, but it looks `forward` up on the class.
    """
    home = torch.autograd.function.FunctionMeta

    def find(function: Any, name: str) -> Any:
        found = type.__getattribute__(function, name)
        if name != "forward":
            return found

        @functools.wraps(found)
        def forward(*args: Any, **kwargs: Any) -> Any:
            check((args, kwargs))
            return found(*args, **kwargs)

        return forward

    with mock.patch.object(home, "__getattribute__", find):
        yield


def all_gather_flat(out: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """Join equal tensors of all ranks, one after the other; torch 2.14 has another name for it."""
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, own, group=group)


def reduce_scatter_flat(out: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to sum a tensor of all ranks, each rank getting its part; torch 2.14 has another name for it."""
    reduce: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work = reduce(out, whole, group=group, async_op=True)
    return work


def saved_tensors_are_hooked() -> bool:
    """Whether somebody decides how tensors are saved for backward where this is called (torch 2.14)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
