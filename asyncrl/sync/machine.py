"""The update state machine: who gets which version next, phase by phase, deadline by deadline.

Pure: no socket, no thread, no clock of its own. The shell (:mod:`asyncrl.sync.publisher`) feeds it what arrived and
what time it is, and sends the orders that come back::

    publish ─┐                       ┌─ prepared ──┐ ┌─ verified ──┐ ┌─ committed ─> idle (serves the version)
             ├─> idle ── PREPARE ────┘   TRANSFER ─┘ │   COMMIT ───┘ │
    join  ───┘     └──────── a deadline passes, or a phase fails ────┴──> quarantined ── join ──> idle

Rules:
- A version is visible at a receiver only after its commit was answered.
- An idle receiver behind the newest version starts the newest: two publishes coalesce. With ``hold`` (lockstep) it takes
  each version in order instead, and every snapshot that it may still need is kept.
- ``rolling``: of the receivers that serve, one at a time is updated; a receiver that joins is not waited for.
- A receiver that fails or misses a deadline is quarantined; the others go on. It serves again after a new join only.

Source: design note, section 6.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from asyncrl.errors import VersionError

__all__ = ["Deadlines", "Order", "Phase", "SyncMachine"]


class Phase(enum.StrEnum):
    """Phases that a receiver answers; the verify phase is the answer to TRANSFER."""

    PREPARE = "prepare"
    TRANSFER = "transfer"
    COMMIT = "commit"


_NEXT = {Phase.PREPARE: Phase.TRANSFER, Phase.TRANSFER: Phase.COMMIT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds that each phase may take; a held commit gets ``hold_s`` on top, the time that lockstep may keep it waiting."""

    prepare_s: float
    transfer_s: float
    commit_s: float
    hold_s: float = 0.0

    def of(self, phase: Phase, *, held: bool) -> float:
        """Seconds allowed for one phase."""
        if phase is Phase.COMMIT:
            return self.commit_s + (self.hold_s if held else 0.0)
        return self.prepare_s if phase is Phase.PREPARE else self.transfer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the shell sends to a receiver: begin ``phase`` of an update, or forget it (``phase`` None) for ``reason``."""

    name: str
    update_id: int
    phase: Phase | None
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class _Receiver:
    committed: int | None = None
    version: int | None = None
    active: int | None = None
    phase: Phase = Phase.PREPARE
    deadline_s: float = 0.0

    @property
    def serves(self) -> bool:
        return self.version is not None


class SyncMachine:
    """Receivers and the updates on their way to them.

    Example:
        >>> machine = SyncMachine(Deadlines(prepare_s=1, transfer_s=1, commit_s=1))
        >>> machine.publish(1, version=0, now_s=0.0)
        []
        >>> [(o.name, o.phase.value) for o in machine.join("generator-0", now_s=0.0)]
        [('generator-0', 'prepare')]
    """

    def __init__(self, deadlines: Deadlines, *, rolling: bool = False, hold: bool = False) -> None:
        self._deadlines = deadlines
        self._rolling = rolling
        self._hold = hold
        self._updates: dict[int, int] = {}
        self._receivers: dict[str, _Receiver] = {}
        self._floor = -1
        self.quarantined: dict[str, str] = {}
        self.late_answers = 0

    # events -------------------------------------------------------------------------------------

    def publish(self, update_id: int, *, version: int, now_s: float) -> list[Order]:
        """A snapshot of ``version`` is ready.

        Raises:
            VersionError: the version does not rise, or the update id was used before.
        """
        newest = self.newest
        if newest is not None and (version <= self._updates[newest] or update_id <= newest):
            raise VersionError(
                f"published versions only rise; met {version} after {self._updates[newest]}: a restore opens a new publisher",
                policy_version=version,
            )
        self._updates[update_id] = version
        return self._start_idle(now_s)

    def join(self, name: str, *, now_s: float) -> list[Order]:
        """A receiver asks for the current weights; it is a new one whatever it was before."""
        self.quarantined.pop(name, None)
        self._receivers[name] = _Receiver()
        return self._start_idle(now_s)

    def answered(self, name: str, update_id: int, phase: Phase, *, now_s: float) -> list[Order]:
        """A receiver finished a phase; an answer that is not awaited (late, or of an older life) changes nothing."""
        receiver = self._receivers.get(name)
        if receiver is None or receiver.active != update_id or receiver.phase is not phase:
            self.late_answers += 1
            return []
        if phase is not Phase.COMMIT:
            return [self._begin(name, receiver, update_id, _NEXT[phase], now_s)]
        receiver.active, receiver.committed, receiver.version = None, update_id, self._updates[update_id]
        return self._start_idle(now_s)

    def failed(self, name: str, update_id: int, reason: str, *, now_s: float) -> list[Order]:
        """A phase failed at a receiver, or it cannot be reached: it is quarantined and the others go on."""
        receiver = self._receivers.get(name)
        if receiver is None or receiver.active != update_id:
            self.late_answers += 1
            return []
        del self._receivers[name]
        self.quarantined[name] = reason
        return [Order(name=name, update_id=update_id, phase=None, reason=reason), *self._start_idle(now_s)]

    def tick(self, *, now_s: float) -> list[Order]:
        """Quarantines every receiver whose deadline has passed."""
        orders: list[Order] = []
        for name, receiver in list(self._receivers.items()):
            if receiver.active is not None and now_s >= receiver.deadline_s:
                reason = f"no answer to {receiver.phase.value} of update {receiver.active} by its deadline"
                orders += self.failed(name, receiver.active, reason, now_s=now_s)
        return orders

    # what the shell asks ------------------------------------------------------------------------

    @property
    def newest(self) -> int | None:
        """Id of the newest update, None before the first publish."""
        return max(self._updates, default=None)

    @property
    def committed_versions(self) -> dict[str, int]:
        """Version that each receiver serves, by name; those still joining or quarantined are not in it."""
        return {name: r.version for name, r in self._receivers.items() if r.version is not None}

    @property
    def waiting(self) -> int:
        """Snapshots that the slowest receiver has not committed yet."""
        self._raise_floor()
        return sum(version > self._floor for version in self._updates.values())

    def next_deadline_s(self) -> float | None:
        """When :meth:`tick` has to be called at the latest."""
        return min((r.deadline_s for r in self._receivers.values() if r.active is not None), default=None)

    def settled(self, update_id: int) -> bool:
        """Whether at least one receiver serves this update or a newer one, and none that serves or joins is behind it."""
        committed = [r.committed for r in self._receivers.values()]
        return bool(committed) and all(c is not None and c >= update_id for c in committed)

    def prune(self) -> list[int]:
        """Forgets the updates that no receiver needs any more and returns their ids: their snapshots can be freed."""
        needed = {r.active for r in self._receivers.values()} | {self.newest}
        if self._hold:
            self._raise_floor()
            needed |= {update_id for update_id, version in self._updates.items() if version >= self._floor}
        gone = [update_id for update_id in self._updates if update_id not in needed]
        for update_id in gone:
            del self._updates[update_id]
        return gone

    # inside -------------------------------------------------------------------------------------

    def _raise_floor(self) -> None:
        serving = self.committed_versions
        if serving and len(serving) == len(self._receivers):
            self._floor = max(self._floor, min(serving.values()))

    def _start_idle(self, now_s: float) -> list[Order]:
        orders = []
        for name, receiver in self._receivers.items():
            update_id = self._next_update(receiver)
            if receiver.active is None and update_id is not None and self._may_start(receiver):
                orders.append(self._begin(name, receiver, update_id, Phase.PREPARE, now_s))
        return orders

    def _may_start(self, receiver: _Receiver) -> bool:
        if not self._rolling or not receiver.serves:
            return True
        return not any(r.active is not None and r.serves for r in self._receivers.values())

    def _next_update(self, receiver: _Receiver) -> int | None:
        if not self._hold:
            return self.newest if receiver.committed != self.newest else None
        behind = [u for u, version in self._updates.items() if receiver.version is None or version > receiver.version]
        return min((u for u in behind if self._updates[u] >= self._floor), default=None)

    def _begin(self, name: str, receiver: _Receiver, update_id: int, phase: Phase, now_s: float) -> Order:
        held = self._hold and receiver.serves
        receiver.active, receiver.phase = update_id, phase
        receiver.deadline_s = now_s + self._deadlines.of(phase, held=held)
        return Order(name=name, update_id=update_id, phase=phase)
