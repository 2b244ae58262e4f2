"""Which finished groups make a batch: admission order, with stragglers overtaken ``w - 1`` times at most.

Source: design note, section 4; fault B63.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from asyncrl.queue.records import GroupRecord

__all__ = ["choose"]


def choose(unleased: Iterable[GroupRecord], wanted: int, window: int) -> tuple[list[GroupRecord], Counter[int]]:
    """Up to ``wanted`` finished groups, and by how much each passed-over ticket would be overtaken more.

    A group is chosen only if every unfinished group ahead of it has been overtaken fewer than ``window - 1`` times,
    those chosen here before it included.

    Args:
        unleased: live groups that are not leased, in admission order.
    """
    chosen: list[GroupRecord] = []
    passed: list[tuple[int, int]] = []
    may_choose = wanted
    for record in unleased:
        if len(chosen) >= may_choose:
            break
        if record.finished:
            chosen.append(record)
            continue
        passed.append((record.ticket, len(chosen)))
        may_choose = min(may_choose, len(chosen) + window - 1 - record.overtaken)
    overtakes = Counter({ticket: len(chosen) - ahead for ticket, ahead in passed if len(chosen) > ahead})
    return chosen, overtakes
