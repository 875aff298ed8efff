"""Which part of an epoch's order each replica takes: plain arithmetic.

The law is parity: step by step, the D replicas together see the batch that one process with batches of D x b would see.
For N = 9, D = 2, b = 2, with `|` between steps and `/` between replicas:

    one process    0 1 2 3   |  4 5 6 7   |  8
    training       0 1 / 2 3 |  4 5 / 6 7 |  8 / 0      the last step is padded from the start of the order
    evaluation     0 1 / 2 3 |  4 5 / 6   |  7 / 8      every sample once: an earlier batch gives one away
    drop_last      0 1 / 2 3 |  4 5 / 6 7 |
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shares:
    """How an order of N samples is dealt out.

    Attributes:
        batch_size: Samples of a replica in a full step, b.
        full_steps: Steps in which every replica takes b samples.
        tail: Sizes by replica of the steps after those.
        padding: How many samples at the end are repeated from the start of the order.
    """

    batch_size: int
    full_steps: int
    tail: tuple[tuple[int, ...], ...]
    padding: int
    num_replicas: int

    def num_batches(self, replica: int) -> int:
        """How many batches `replica` gets."""
        return self.full_steps + sum(sizes[replica] > 0 for sizes in self.tail)

    def samples_after(self, steps: int) -> int:
        """How many samples of the order all replicas have taken together after `steps` steps."""
        full = min(steps, self.full_steps) * self.num_replicas * self.batch_size
        tail = sum(sum(sizes) for sizes in self.tail[: max(0, steps - self.full_steps)])
        ended = steps >= self.full_steps + len(self.tail)
        return full + tail - (self.padding if ended else 0)

    def spans(self, replica: int) -> Iterator[tuple[int, int]]:
        """Start and stop of each batch of `replica` in the padded order."""
        for step in range(self.full_steps):
            start = (step * self.num_replicas + replica) * self.batch_size
            yield start, start + self.batch_size
        used = self.full_steps * self.num_replicas * self.batch_size
        for sizes in self.tail:
            start = used + sum(sizes[:replica])
            if sizes[replica]:
                yield start, start + sizes[replica]
            used += sum(sizes)


def deal(num_samples: int, batch_size: int, num_replicas: int, *, training: bool, drop_last: bool = False) -> Shares:
    """Deal an order of `num_samples` out to the replicas.

    Training: all replicas get equally many batches, of equal sizes. Evaluation: every sample exactly once; equally many
    batches where that is possible, else the first replicas get one more. A set with fewer samples than replicas is
    padded in evaluation too, since a replica without any batch would miss what the others agree on.
    """
    full_steps, tail = divmod(num_samples, batch_size * num_replicas)
    if drop_last or tail == 0:
        sizes: tuple[tuple[int, ...], ...] = ()
        padding = 0
    elif training or num_samples < num_replicas:
        share = -(-tail // num_replicas)
        sizes = ((share,) * num_replicas,)
        padding = share * num_replicas - tail
    elif tail >= num_replicas or batch_size == 1:
        sizes, padding = (_spread(tail, num_replicas),), 0
    else:
        # Fewer samples are left than there are replicas: the step before gives some away, so that nobody sits one out.
        full_steps -= 1
        sizes = (_spread((batch_size - 1) * num_replicas + tail, num_replicas), (1,) * num_replicas)
        padding = 0
    return Shares(batch_size=batch_size, full_steps=full_steps, tail=sizes, padding=padding, num_replicas=num_replicas)


def _spread(num_samples: int, num_replicas: int) -> tuple[int, ...]:
    share, rest = divmod(num_samples, num_replicas)
    return tuple(share + (replica < rest) for replica in range(num_replicas))
