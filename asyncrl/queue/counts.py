"""The gate's state as numbers: :class:`asyncrl.queue.messages.QueueStatus`.

Source: design note, sections 4 and 7.
"""

from __future__ import annotations

from asyncrl.queue.book import Book
from asyncrl.queue.fleet import Fleet
from asyncrl.queue.leasing import Leasing
from asyncrl.queue.messages import LagHistogram, QueueStatus
from asyncrl.queue.records import GroupState

__all__ = ["status_of"]


def status_of(
    book: Book,
    leasing: Leasing,
    fleet: Fleet,
    *,
    now_s: float,
    rewards: tuple[float, int],
    refused: dict[str, int],
    blocked: str,
    log_bytes: int,
) -> QueueStatus:
    """Counts of the moment. ``generating`` includes tickets that wait to be issued again, so that
    ``in_flight = generating + queued_groups + leased``; ``lag.consumed`` is that of the last committed step.
    """
    ledger = book.ledger
    return QueueStatus(
        step=ledger.steps,
        admitted=ledger.admitted,
        trained=ledger.trained,
        dropped=ledger.dropped_counts(),
        in_flight=ledger.in_flight,
        generating=book.count(GroupState.GENERATING, GroupState.REISSUE),
        queued_groups=book.count(GroupState.QUEUED),
        queued_bytes=book.queued_bytes,
        oldest_queued_s=book.oldest_queued_s(now_s),
        leased=book.count(GroupState.LEASED),
        reissued=book.reissued,
        lag=_lag(book, leasing, fleet),
        generator_tokens=fleet.total_tokens(),
        rewards_sum=rewards[0],
        rewards_count=rewards[1],
        refused=dict(refused),
        blocked=blocked,
        producers=fleet.versions(),
        stopping=book.stopping,
        log_bytes=log_bytes,
    )


def _lag(book: Book, leasing: Leasing, fleet: Fleet) -> LagHistogram:
    step = book.ledger.steps
    queued = {step - version: tokens for version, tokens in sorted(book.queued_versions.items(), reverse=True)}
    # a heartbeat may be older than the groups that were put since: what no ticket can hold any more is not in flight
    held = book.lowest_held_version()
    oldest = step + 1 if held is None else held
    in_flight = {step - version: tokens for version, tokens in fleet.in_flight().items() if version >= oldest}
    return LagHistogram(consumed=leasing.lag_consumed, in_flight=in_flight, queued=queued)
