"""One broker as an observer sees it, and the status of a queue from those of its shards.

Source: design note, sections 4 and 7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from asyncrl.queue.connection import BlockingClient, expect
from asyncrl.queue.messages import Done, LagHistogram, ProducerGone, QueueStatus, Role, Status, StatusRequest, Stop

__all__ = ["ObserverLink", "merged_status"]

K = TypeVar("K")


class ObserverLink(BlockingClient):
    """An observer's conversation with one broker."""

    role = Role.OBSERVER

    def status(self) -> QueueStatus:
        """Counts of the moment."""
        return expect(Status, self.ask(StatusRequest())[0], self._dialogue).status

    def tell(self, body: ProducerGone | Stop) -> None:
        """Something that is only confirmed."""
        expect(Done, self.ask(body)[0], self._dialogue)


def merged_status(shards: Sequence[QueueStatus]) -> QueueStatus:
    """Counts of all shards together; versions and the oldest age are the extremes, reasons stand beside each other."""
    if len(shards) == 1:
        return shards[0]
    return QueueStatus(
        step=max(s.step for s in shards),
        admitted=sum(s.admitted for s in shards),
        trained=sum(s.trained for s in shards),
        dropped=_sum([s.dropped for s in shards]),
        in_flight=sum(s.in_flight for s in shards),
        generating=sum(s.generating for s in shards),
        queued_groups=sum(s.queued_groups for s in shards),
        queued_bytes=sum(s.queued_bytes for s in shards),
        oldest_queued_s=max(s.oldest_queued_s for s in shards),
        leased=sum(s.leased for s in shards),
        reissued=sum(s.reissued for s in shards),
        lag=LagHistogram(
            consumed=_sum([s.lag.consumed for s in shards]),
            in_flight=_sum([s.lag.in_flight for s in shards]),
            queued=_sum([s.lag.queued for s in shards]),
        ),
        generator_tokens=sum(s.generator_tokens for s in shards),
        rewards_sum=sum(s.rewards_sum for s in shards),
        rewards_count=sum(s.rewards_count for s in shards),
        refused=_sum([s.refused for s in shards]),
        blocked="; ".join(dict.fromkeys(f"shard {n}: {s.blocked}" for n, s in enumerate(shards) if s.blocked)),
        producers={name: version for s in reversed(shards) for name, version in s.producers.items()},
        stopping=all(s.stopping for s in shards),
        log_bytes=sum(s.log_bytes for s in shards),
    )


def _sum(counts: Sequence[dict[K, int]]) -> dict[K, int]:
    total: Counter[K] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)
