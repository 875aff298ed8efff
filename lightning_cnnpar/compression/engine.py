"""Compresses and sums buckets of gradients beside the backward pass.

    CPU     autograd's thread ─ start ─► encoder's thread ─► sender's thread, one collective after the other
    CUDA    autograd's thread ─ start ─► the same work on a stream of its own

The sender has a process group of its own, so nothing of other threads comes between its collectives.
"""

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cnnpar.compression.base import BlockwiseCompressor, Compressor
from lightning_cnnpar.compression.exchange import Dense, Exchange, Part, Site
from lightning_cnnpar.compression.low_rank import LowRank
from lightning_cnnpar.compression.policy import CompressionPolicy
from lightning_cnnpar.compression.powersgd import PowerSGD
from lightning_cnnpar.compression.residual import Residuals
from lightning_cnnpar.compression.sparse import Sparse
from lightning_cnnpar.compression.swap import ring_bytes
from lightning_cnnpar.compression.topk import TopK
from lightning_cnnpar.compression.two_phase import Blockwise
from lightning_cnnpar.metrics import Totals

__all__ = ["CompressionEngine", "CompressionStatistics", "Part", "Pending"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressionStatistics(Totals):
    """What one step, or the whole run, sent from one rank.

    Attributes:
        steps: Steps counted.
        payload_bytes: Given to collectives.
        wire_bytes: Sent, by the formula of each collective.
        dense_bytes: What a ring all-reduce of the same gradients as they are would have sent.
        encode_seconds: Spent on the encoder's thread.
        send_seconds: Spent on the sender's thread: collectives and decoding.
    """

    steps: int = 0
    payload_bytes: int = 0
    wire_bytes: float = 0.0
    dense_bytes: float = 0.0
    encode_seconds: float = 0.0
    send_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Bytes sent, as a share of those of plain gradients."""
        return self.wire_bytes / self.dense_bytes if self.dense_bytes else 1.0


@final
class Pending:
    """A bucket under way.

    Attributes:
        num_bytes: What this rank gives to collectives.
    """

    def __init__(self, done: Callable[[], None], num_bytes: int) -> None:
        self._done = done
        self.num_bytes = num_bytes

    def wait(self) -> None:
        """Return when the parts hold the sums (on CUDA: in the order of the current stream)."""
        self._done()


@final
class CompressionEngine:
    """Sums gradients over a group, compressed.

    Args:
        policy: What is compressed how.
        group: The ranks; this engine's alone.
        device: Where gradients are.
        loss_scale: By what gradients are multiplied at the moment.

    Attributes:
        residuals: What compression has left out so far on this rank.
        step: Optimizer steps before the present one.
        statistics: Of the run so far.
        last: Of the last step.
        momentum: Of the velocities that are summed in place of gradients; 0 for none.
    """

    def __init__(
        self,
        policy: CompressionPolicy,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        loss_scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.residuals = Residuals(rank, size)
        self.step = 0
        self.momentum = policy.momentum
        self.statistics = CompressionStatistics()
        self.last = CompressionStatistics()
        self._policy = policy
        self._loss_scale = loss_scale
        self._site = Site(group=group, rank=rank, size=size, residuals=self.residuals, momentum=policy.momentum)
        self._runner: _Threads | _Stream = _Threads() if device.type == "cpu" else _Stream(device)
        self._begun = False
        self._current = CompressionStatistics()
        self._seconds = {"encode": 0.0, "send": 0.0}

    def start(self, key: int, parts: Sequence[Part]) -> Pending:
        """Begin to sum a bucket; every rank calls this for the same buckets in the same order.

        Args:
            key: Which bucket it is.
            parts: Its parameters. Their values become the sums.
        """
        if not self._begun:
            # A step that wasn't taken back counts once the next one begins.
            self.residuals.commit()
            self._begun, self._site.faults = True, []
            self._site.scale = float(self._loss_scale())
        exchanges = self._exchanges(key, parts)
        payload_bytes = sum(exchange.payload_bytes for exchange in exchanges)
        self._current += CompressionStatistics(
            payload_bytes=payload_bytes,
            wire_bytes=sum(exchange.wire_bytes for exchange in exchanges),
            dense_bytes=ring_bytes(self._site.size, sum(part.num_bytes for part in parts)),
        )
        done = self._runner.run(
            lambda: self._timed("encode", [exchange.encode for exchange in exchanges]),
            lambda: self._timed("send", [exchange.send for exchange in exchanges]),
        )
        return Pending(done, payload_bytes)

    def finish_step(self, unused: Collection[str] = ()) -> CompressionStatistics:
        """All buckets of a step have been waited for: drops the residuals of a step that was not finite everywhere.

        The step counts once the next one begins; `take_back` before that undoes it.

        Args:
            unused: Parameters whose sums nobody uses, the same on all ranks: their residuals stay as they were.

        Returns:
            What this step sent.
        """
        self.residuals.withdraw(unused)
        if any(bool(fault) for fault in self._site.faults):
            self.residuals.discard()
        self.last = self._current + CompressionStatistics(
            steps=1, encode_seconds=self._seconds["encode"], send_seconds=self._seconds["send"]
        )
        self.statistics += self.last
        self._reset()
        self.step += 1
        return self.last

    def abandon_step(self) -> None:
        """All buckets that were started have been waited for, but the step was given up: it never took place."""
        self.residuals.discard()
        self._reset()

    def _reset(self) -> None:
        self._begun, self._current, self._seconds = False, CompressionStatistics(), {"encode": 0.0, "send": 0.0}

    def take_back(self) -> None:
        """The optimizer skips the step, since some rank of the world had gradients that were not finite."""
        self.residuals.discard()

    def close(self) -> None:
        """End the threads."""
        self._runner.close()

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def gather_state(self, group: dist.ProcessGroup) -> dict[str, Any]:
        """Step and residuals, in types that `torch.load(weights_only=True)` reads; whole on the group's first rank.

        Args:
            group: The same ranks, on the CPU. All of them call this, between two steps.

        Returns:
            `step`; `residuals`, see `Residuals.gather`; and `waiting`, what was loaded and not taken up so far.
        """
        self.residuals.commit()
        return {"step": self.step, "residuals": self.residuals.gather(group), "waiting": self.residuals.saved}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `gather_state` returned, before the first step; the number of replicas may be another."""
        self.step = int(state["step"])
        self.residuals.load({**state.get("waiting", {}), **state["residuals"]})

    def take_up(self, parameters: Mapping[str, Tensor]) -> None:
        """These parameters are on this rank: each goes on from what was loaded for it, the first time it is named.

        Args:
            parameters: By name, in the memory format of their gradients.
        """
        self.residuals.take_up(parameters)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _exchanges(self, key: int, parts: Sequence[Part]) -> list[Exchange]:
        groups: dict[Compressor | None, list[Part]] = {}
        for part in parts:
            groups.setdefault(self._policy.compressor(part.name, part.shape, self.step), []).append(part)
        return [
            self._exchange((key, index), compressor, members)
            for index, (compressor, members) in enumerate(groups.items())
        ]

    def _exchange(self, key: Any, compressor: Compressor | None, parts: Sequence[Part]) -> Exchange:
        if isinstance(compressor, BlockwiseCompressor):
            return Blockwise(self._site, key, parts, compressor)
        if isinstance(compressor, TopK):
            return Sparse(self._site, key, parts, compressor)
        if isinstance(compressor, PowerSGD):
            return LowRank(self._site, key, parts, compressor)
        return Dense(self._site, key, parts)

    def _timed(self, kind: str, work: Sequence[Callable[[], None]]) -> None:
        begin = time.perf_counter()
        with torch.no_grad():
            for one in work:
                one()
        self._seconds[kind] += time.perf_counter() - begin


class _Threads:
    """An encoder and a sender. After a failure nothing more is done: other ranks would wait for what can't come."""

    def __init__(self) -> None:
        self._encoder = ThreadPoolExecutor(1, "gradient-encoder")
        self._sender = ThreadPoolExecutor(1, "gradient-sender")
        self._failure: BaseException | None = None

    def run(self, encode: Callable[[], None], send: Callable[[], None]) -> Callable[[], None]:
        if self._failure is not None:
            raise RuntimeError("An earlier bucket of gradients could not be sent.") from self._failure
        encoded = self._encoder.submit(self._guarded, encode)
        return self._sender.submit(self._guarded, send, encoded).result

    def _guarded(self, work: Callable[[], None], after: "Future[None] | None" = None) -> None:
        try:
            if after is not None:
                after.result()
            if self._failure is None:
                work()
        except BaseException as failure:
            self._failure = failure
            raise

    def close(self) -> None:
        self._encoder.shutdown(wait=False, cancel_futures=True)
        self._sender.shutdown(wait=False, cancel_futures=True)


class _Stream:
    """The same work in order on a stream beside the backward pass; collectives are enqueued there too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, encode: Callable[[], None], send: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            encode()
            send()
            done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)

    def close(self) -> None:
        self._stream.synchronize()
