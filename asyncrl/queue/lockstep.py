"""The deterministic schedule: which version samples which ticket, and which tickets make which step.

In lockstep every ticket owns a slot, dropped or not: step ``t`` trains tickets ``G t .. G t + G - 1``, and ticket
``i`` is sampled wholly by version ``max(first, i // G - S)``, where ``first`` is the step that the run started from (0, or
that of the checkpoint, whose older weights are gone). So a batch is a pure function of the weights before it.

Source: design note, section 4; fault B34.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.errors import QueueError
from asyncrl.queue.book import Book
from asyncrl.queue.records import GroupRecord, GroupState

__all__ = ["coming_version", "exact_version", "may_advance", "slots_of_step", "stranded"]

_UNFINISHED = (GroupState.GENERATING, GroupState.REISSUE)


def exact_version(ticket: int, groups_per_step: int, max_staleness: int, first_version: int = 0) -> int:
    """The only version that may sample a ticket.

    Example:
        >>> [exact_version(i, groups_per_step=2, max_staleness=1) for i in range(6)]
        [0, 0, 0, 0, 1, 1]
    """
    return max(first_version, ticket // groups_per_step - max_staleness)


def coming_version(book: Book) -> int | None:
    """The version that the next new ticket asks for; None when there is none."""
    settings = book.settings
    if book.exhausted:
        return None
    return exact_version(book.ledger.next_ticket, settings.groups_per_step, settings.max_staleness, book.first_version)


def may_advance(book: Book, version: int) -> bool:
    """Whether no ticket, present or to come, will ask for ``version`` or one below it.

    A ticket that another producer samples counts: should that one die, somebody must still have its version.
    """
    wanted = [record.version for record in book.live() if record.state in _UNFINISHED]
    coming = coming_version(book)
    return all(other > version for other in (wanted if coming is None else [*wanted, coming]))


def stranded(book: Book, versions: Iterable[int]) -> str:
    """Why nobody can go on, if every producer has left behind the version that a ticket needs; empty otherwise.

    Args:
        versions: committed by the living producers; -1 by one that has not said it.
    """
    waiting = [(r.version, r.ticket) for r in book.live() if r.state is GroupState.REISSUE]
    coming = coming_version(book)
    if coming is not None:
        waiting.append((coming, book.ledger.next_ticket))
    lowest = min(versions, default=-1)
    if lowest < 0 or not waiting or min(waiting)[0] >= lowest:
        return ""
    version, ticket = min(waiting)
    return (
        f"ticket {ticket} is sampled by version {version} alone, and every producer has gone on to version {lowest} or beyond, "
        "as after a death: in lockstep nothing may stand in for it; resume from the last checkpoint"
    )


def slots_of_step(book: Book, step: int) -> tuple[list[GroupRecord], str]:
    """Groups of a step, or none with the reason why it is not ready. Neither: the source has ended.

    Raises:
        QueueError: every group of the step was dropped, so there is nothing to train.
    """
    groups, total = book.settings.groups_per_step, book.settings.total_tickets
    start = step * groups
    end = start + groups if total is None else min(start + groups, total)
    if start >= end:
        return [], ""
    records = [record for record in book.live() if start <= record.ticket < end]
    missing = [record for record in records if not record.finished]
    if book.ledger.next_ticket < end or missing:
        waiting = f"ticket {missing[0].ticket} at {missing[0].producer}" if missing else f"ticket {book.ledger.next_ticket} to be asked for"
        return [], f"step {step} trains tickets {start} to {end - 1} and waits for {waiting}"
    if not records:
        raise QueueError(
            f"all tickets {start} to {end - 1} of step {step} were dropped, and in lockstep none takes their slots: mend the prompts"
        )
    return records, ""
