"""Gradients on their way back to where values came from.

Their shapes are known from the way there. A header says whether every value of a bundle has a gradient; where some have
none (no path leads from them to the loss), each microbatch gets a header with a list: what has no gradient stays
without one, as it would in one process.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_cnnpar.pipeline import wire
from lightning_cnnpar.pipeline.exchange import Arrival, take, wire_type
from lightning_cnnpar.pipeline.routes import Bundle, Parcel
from lightning_cnnpar.pipeline.transport import BACK_TAG, Header, Link
from lightning_cnnpar.pipeline.wire import Meta

_EVERY, _SOME = -1, -2


class GradientOutbox:
    """Sends gradients back to where values came from, in one backward pass."""

    def __init__(self, link: Link, device: torch.device, wire_dtype: torch.dtype | None = None) -> None:
        self._link, self._device, self._wire_dtype = link, device, wire_dtype
        self._complete: dict[tuple[int, int], bool] = {}

    def send(self, bundle: Bundle, microbatch: int, metas: Sequence[Meta], gradients: Sequence[Tensor | None]) -> None:
        """Send the gradients of a microbatch of a bundle.

        Args:
            bundle: As it came.
            microbatch: Which one.
            metas: Descriptions of those of its values that require a gradient.
            gradients: For each of them the gradient, or `None` where no path leads to the loss.
        """
        pair = (bundle.stage, bundle.source)
        present = [gradient is not None for gradient in gradients]
        if pair not in self._complete:
            self._complete[pair] = all(present)
            number = _EVERY if all(present) else _SOME
            body = None if all(present) else present
            self._link.send_header(Header(number, body), bundle.source, tag=_back(bundle))
        elif not self._complete[pair]:
            self._link.send_header(Header(_SOME, present), bundle.source, tag=_back(bundle))
        for meta, gradient in zip(metas, gradients, strict=True):
            if gradient is None and not self._complete[pair]:
                continue
            dtype = wire_type(meta, self._wire_dtype)
            if gradient is None:
                block = wire.empty(meta, dtype, self._device)[1].zero_()
            else:
                block = wire.flat(gradient, meta, dtype)
            key = ("B", bundle.stage, bundle.source, microbatch)
            self._link.send(block, bundle.source, tag=_back(bundle), key=key)


class GradientInbox:
    """Receives the gradients of one backward pass.

    Args:
        link: Connections to the other ranks.
        incoming: For each other rank the parcels whose gradients it sends, in order.
        metas: Descriptions of the values of a parcel that require a gradient; empty if nothing comes back, `None` if
            it has not been sent yet.
        device: Where stages compute.
        wire_dtype: As the senders have it.
        ahead: How many parcels may be received before they are asked for, which takes their memory; `None`: any number.
    """

    def __init__(
        self,
        link: Link,
        incoming: Mapping[int, Iterable[Parcel]],
        metas: Callable[[Bundle, int], Sequence[Meta] | None],
        *,
        device: torch.device,
        wire_dtype: torch.dtype | None = None,
        ahead: int | None = None,
    ) -> None:
        self._link, self._metas, self._device, self._wire_dtype = link, metas, device, wire_dtype
        self._ahead = ahead
        self._queues = {source: deque(parcels) for source, parcels in incoming.items()}
        self._headers: dict[tuple[int, int], Callable[[], Header]] = {}
        self._complete: dict[tuple[int, int], bool] = {}
        self._arrivals: dict[tuple[int, int, int], list[Arrival | None]] = {}

    def expect_headers(self) -> None:
        """Be ready for the first header of each bundle, where it is certain that one comes."""
        for source, queue in self._queues.items():
            for bundle, _ in queue:
                if (bundle.stage, source) not in self._headers:
                    self._headers[bundle.stage, source] = self._link.expect_header(source, tag=_back(bundle))

    def gradients(self, bundle: Bundle, microbatch: int) -> list[Tensor | None]:
        """The gradients of a parcel that this rank sent, once they are here."""
        key = (bundle.stage, bundle.destination, microbatch)
        while key not in self._arrivals:
            self._post_next(bundle.destination)
            while self._ahead is None and self._may_post(bundle.destination):
                self._post_next(bundle.destination)
        arrivals = self._arrivals.pop(key)
        if self._ahead is not None:
            waiting = sum(1 for _, source, _ in self._arrivals if source == bundle.destination)
            while waiting < self._ahead and self._may_post(bundle.destination):
                waiting += self._post_next(bundle.destination)
        return [None if arrival is None else take(arrival) for arrival in arrivals]

    def _may_post(self, source: int) -> bool:
        """Whether the next parcel waits for no header, and is known to come."""
        if not self._queues[source]:
            return False
        bundle, microbatch = self._queues[source][0]
        return self._complete.get((bundle.stage, source), False) and self._metas(bundle, microbatch) is not None

    def _post_next(self, source: int) -> bool:
        """Post the receives of the next parcel; whether there are any."""
        bundle, microbatch = self._queues[source].popleft()
        metas = self._metas(bundle, microbatch)
        assert metas is not None
        if not metas:
            return False
        present = self._present(bundle, source)
        self._arrivals[bundle.stage, source, microbatch] = [
            self._post(bundle, meta) if present is None or present[position] else None
            for position, meta in enumerate(metas)
        ]
        return True

    def _present(self, bundle: Bundle, source: int) -> list[bool] | None:
        """Which values have a gradient; `None` for all."""
        pair = (bundle.stage, source)
        if self._complete.get(pair):
            return None
        expect = self._headers.pop(pair, None) or self._link.expect_header(source, tag=_back(bundle))
        header = expect()
        self._complete[pair] = header.number == _EVERY
        present: list[bool] | None = header.body
        return present

    def _post(self, bundle: Bundle, meta: Meta) -> Arrival:
        tensor, block = wire.empty(meta, wire_type(meta, self._wire_dtype), self._device)
        return Arrival(
            meta=meta, tensor=tensor, receipt=self._link.receive(block, bundle.destination, tag=_back(bundle))
        )


def _back(bundle: Bundle) -> int:
    return BACK_TAG + bundle.stage
