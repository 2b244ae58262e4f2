"""The queue goes back to the frontier of a checkpoint: what the weights have forgotten is trained again, and nothing twice.

Relative to the restored weights of step c every ticket beyond the frontier is open once more. A finished group whose payload is
kept and whose tokens are all of versions <= c waits in the queue again, in ticket order: the weights that sampled it are
ancestors of those that will train it, and fewer slots lie ahead of it than when it was issued, so the bound holds.
Any other ticket is admitted anew under a new attempt. What had been finished and is not used again counts as
``dropped(abandoned)``, admitted once more, so that the counts over the whole life of a run still add up.

Source: design note, section 4; fault B58.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from asyncrl.queue.gate import Gate
from asyncrl.queue.messages import DropReason, Frontier
from asyncrl.queue.records import GateState, GroupRecord, GroupState

__all__ = ["restored"]


def restored(
    gate: Gate,
    frontier: Frontier,
    settled: Iterable[GroupRecord],
    has_payload: Callable[[int], bool],
    incarnation: int,
    now_s: float,
) -> tuple[Gate, list[GroupRecord]]:
    """A gate at ``frontier`` with the groups of ``gate``, and those that were given up, finished or not: their rows must go.

    Args:
        frontier: of the checkpoint, this shard's part. settled: records settled since then, as far as they are known.
        has_payload: whether the payload of a ticket is still kept.
    """
    step, lockstep = frontier.steps, gate.settings.lockstep
    done, before = _SettledTickets(frontier), gate.state()
    live: list[GroupRecord] = []
    given_up: list[GroupRecord] = []
    attempts = dict(before.attempts)
    given_up += [record for record in gate.live() if record.ticket in done]  # trained by a learner whose commit did not arrive here
    attempts.update({record.ticket: record.attempt + 1 for record in given_up})
    in_weights = len(given_up)
    for record in sorted((*settled, *gate.live()), key=lambda record: record.ticket):
        if record.ticket in done:
            continue
        if not lockstep and has_payload(record.ticket) and record.meta is not None and record.meta.newest_version <= step:
            live.append(_queued_again(record, step))
            continue
        attempts[record.ticket] = record.attempt + 1
        given_up.append(record)
    state = _state_at(before, frontier, attempts, live)
    fresh = Gate.recovered(gate.settings, state, live, incarnation, now_s)
    finished = sum(record.meta is not None or record.settled_at >= 0 for record in given_up[in_weights:])
    fresh.abandon(finished + _abandoned(before.frontier) - _abandoned(frontier))
    fresh.fleet.forget_versions()
    return fresh, given_up


class _SettledTickets:
    def __init__(self, frontier: Frontier) -> None:
        self._low, self._above = frontier.low, set(frontier.settled_above)

    def __contains__(self, ticket: int) -> bool:
        return ticket < self._low or ticket in self._above


def _queued_again(record: GroupRecord, step: int) -> GroupRecord:
    used_at = tuple(use for use in record.used_at if use < step)
    return replace(record, state=GroupState.QUEUED, used_at=used_at, overtaken=0, settled_at=-1)


def _state_at(before: GateState, frontier: Frontier, attempts: dict[int, int], live: list[GroupRecord]) -> GateState:
    return msgspec.structs.replace(
        before,
        frontier=frontier,
        next_ticket=0,
        first_version=frontier.steps,
        replaced_this_step=0,
        last_commit=None,
        lease=(),
        overtakes={},
        lag_consumed={},
        attempts=attempts,
        requeued=tuple(record.ticket for record in live),
        inserted=len(live),
        sampled=float(sum(record.uses for record in live)),
    )


def _abandoned(frontier: Frontier) -> int:
    return frontier.dropped.get(DropReason.ABANDONED, 0)
