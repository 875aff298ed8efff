"""The mirror: one rank of a replica loads, all ranks get its batches.

    rank 0 of the replica    DataLoader, workers ─► batch ─┬─► step
                                                           │ frame: batch, changed random states | end | exception
    rank 1 .. P - 1          no data set, no workers       └─► step

Every `iter` and `next` is a collective of the replica: all ranks call them in the same order, since all run the same
loops, and nothing is fetched ahead, so an epoch may be abandoned at any batch.
"""

import itertools
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import torch.distributed as dist
from torch.utils.data import DataLoader, IterDataPipe

from lightning_cnnpar._compat import is_index_recorder
from lightning_cnnpar.mesh import Mesh
from lightning_cnnpar.mirror.agreement import end_together
from lightning_cnnpar.mirror.debug import BatchCheck, batch_check
from lightning_cnnpar.mirror.exchange import Exchange, GroupExchange
from lightning_cnnpar.mirror.failures import pack_exception, raise_packed
from lightning_cnnpar.mirror.frames import Channel, Label
from lightning_cnnpar.mirror.layers import Layer, Start, add_layer
from lightning_cnnpar.mirror.packing import Packed, pack
from lightning_cnnpar.mirror.randomness import States, apply_states, changed_states, states

_STARTED, _BATCH, _END, _FAILURE = range(4)
_KINDS = ("start of an epoch", "batch", "end of the data", "exception")

_numbers = itertools.count()
_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, Channel] = weakref.WeakKeyDictionary()


def mirror_loader(loader: Any, mesh: Mesh, *, training: bool = False, exchange: Exchange | None = None) -> Any:
    """A loader like `loader` of which the first rank of each replica loads and the others receive the batches.

    Every rank of the replica makes one from its own `loader` and iterates it alike. On the ranks that receive, neither
    the data set nor the workers are touched; length and attributes are those of their own `loader`. With one rank in a
    replica, nothing is sent.

    What loading draws from the global random generators (a shuffle's seed, augmentations without workers) is drawn on
    all ranks of the replica, so they go on alike.

    Args:
        loader: What `shard_loader` returned, or any iterable.
        mesh: The ranks.
        training: Let all replicas end their epochs together, also for loaders that didn't go through `shard_loader`.
        exchange: How the loading ranks talk; over the mesh's groups by default.

    Raises:
        ValueError: For an `IterDataPipe`, whose epochs are a collective of all ranks.
    """
    if training:
        loader = end_together(loader, exchange or GroupExchange(mesh))
    if mesh.pipeline_size == 1:
        return loader
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterDataPipe):
        raise ValueError(
            f"The data set `{type(loader.dataset).__name__}` is an IterDataPipe. Those start each epoch with a"
            f" collective of all ranks, but with pipeline_parallel_size={mesh.pipeline_size} only one rank of a replica"
            " loads. Wrap it in an `IterableDataset` whose `__iter__` returns `iter(pipe)`."
        )
    return add_layer(loader, Mirror(mesh))


class Mirror(Layer):
    """Carries the batches of one loader over a replica."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._number = next(_numbers)

    def iterate(self, start: Start, loader: Any) -> Iterator[Any]:
        """See `Layer.iterate`."""
        recorder = _recorder(loader)
        check = batch_check(self._mesh)
        if self._mesh.pipeline_rank == 0:
            sender = _Sender(self._mesh, self._number)
            return sender.batches(sender.started(start), recorder, check)
        receiver = _Receiver(self._mesh, self._number)
        receiver.receive()
        if recorder is not None:
            recorder.seen_batch_indices = []
        return receiver.batches(recorder, check)


class _Sender:
    """An epoch on the rank that loads."""

    def __init__(self, mesh: Mesh, number: int) -> None:
        self._channel = _channel(mesh)
        self._number = number
        self._step = 0
        self._origin = _origin(mesh)

    def started(self, start: Start) -> Iterator[Any]:
        before = states()
        try:
            iterator = start()
        except Exception as error:
            self._fail(error, before)
        self._send(_STARTED, pack(None), before)
        return iterator

    def batches(self, iterator: Iterator[Any], recorder: Any, check: BatchCheck) -> Iterator[Any]:
        for index in itertools.count():
            check.before()
            before = states()
            try:
                batch = next(iterator)
                packed = pack((batch, recorder and recorder.seen_batch_indices[index]))
            except StopIteration:
                self._send(_END, pack(None), before)
                return
            except Exception as error:
                self._fail(error, before)
            self._send(_BATCH, packed, before)
            check.after(batch, index)
            yield batch

    def _fail(self, error: Exception, before: States) -> NoReturn:
        self._send(_FAILURE, pack(pack_exception(error)), before)
        error.add_note(f"({self._origin})")
        raise error

    def _send(self, kind: int, packed: Packed, before: States) -> None:
        label = Label(kind=kind, loader=self._number, step=self._step)
        self._channel.send(label, packed, changed_states(before))
        self._step += 1


class _Receiver:
    """An epoch on a rank that doesn't load."""

    def __init__(self, mesh: Mesh, number: int) -> None:
        self._channel = _channel(mesh)
        self._number = number
        self._step = 0
        self._rank = mesh.pipeline_rank
        self._origin = _origin(mesh)

    def receive(self) -> tuple[int, Any]:
        label, content, changed = self._channel.receive()
        if (label.loader, label.step) != (self._number, self._step):
            raise RuntimeError(
                f"The ranks of a replica are at different points: pipeline rank {self._rank} asked for frame"
                f" {self._step} of loader {self._number}, pipeline rank 0 sent frame {label.step} of loader"
                f" {label.loader} ({_KINDS[label.kind]}). All ranks must iterate the same loaders in the same order;"
                " look for a `break`, `continue` or `next` that depends on the rank."
            )
        self._step += 1
        apply_states(changed)
        if label.kind == _FAILURE:
            raise_packed(content, note=self._origin)
        return label.kind, content

    def batches(self, recorder: Any, check: BatchCheck) -> Iterator[Any]:
        for index in itertools.count():
            check.before()
            kind, content = self.receive()
            if kind == _END:
                return
            batch, indices = content
            if recorder is not None:
                recorder.seen_batch_indices.append(indices)
            check.after(batch, index)
            yield batch


def _channel(mesh: Mesh) -> Channel:
    # One for all loaders of a replica: its frames have one order.
    group = mesh.control_group
    assert group is not None
    if group not in _channels:
        _channels[group] = Channel(mesh)
    return _channels[group]


def _origin(mesh: Mesh) -> str:
    return f"raised by the data loader on rank {mesh.global_rank(0)}, which loads for replica {mesh.data_rank}"


def _recorder(loader: Any) -> Any:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return batch_sampler if is_index_recorder(batch_sampler) else None
