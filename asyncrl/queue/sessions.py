"""Who speaks to the broker, and in which order: sequence numbers, repeats, gaps.

A session begins with a hello and belongs to one process, told apart by its socket's identity. Each request carries the
number after the last one; a repeat is answered from memory, a gap is refused (fault B56: ZeroMQ drops without an error). A hello
closes the gap: numbers go on from there, and what is missing before it is asked anew.

Source: design note, section 3.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from asyncrl.errors import LostMessage, QueueError, UnknownSession
from asyncrl.queue.messages import Hello, Role
from asyncrl.queue.wire import Envelope

__all__ = ["Arrival", "Session", "Sessions"]

REMEMBERED = 64
MAX_LOST = 256
MAX_SESSIONS = 4096


class Arrival(enum.Enum):
    """What a request is within its session."""

    NEW = "new"
    WAITING = "waiting"
    REPEAT = "repeat"


class Session:
    """One process's conversation."""

    def __init__(self, sender: str, identity: bytes, hello: Hello, sequence: int) -> None:
        self.sender = sender
        self.identity = identity
        self.role: Role = hello.role
        self.incarnation = hello.incarnation
        self._first = self._last = sequence
        self._answers: OrderedDict[int, list[Any]] = OrderedDict()
        self._granted: dict[int, tuple[tuple[int, int], ...]] = {}
        self._open: set[int] = set()
        self._lost = 0

    def greeted_again(self, sequence: int) -> Arrival:
        """The same process lost its welcome, or messages before, and said hello once more: its numbers go on from there."""
        if sequence <= self._last:
            return Arrival.REPEAT
        self._last = sequence
        return Arrival.NEW

    def arrive(self, sequence: int) -> Arrival:
        """Takes note of a request's number.

        Raises:
            LostMessage: a gap, or a repeat of what never came or was forgotten. QueueError: that, too often with nothing in between.
            UnknownSession: a repeat of what was asked before the hello.
        """
        if sequence < self._first:
            raise UnknownSession(f"{self.sender} repeats number {sequence}, from before its hello: ask anew")
        if sequence == self._last + 1:
            self._last, self._lost = sequence, 0
            self._open.add(sequence)
            return Arrival.NEW
        if sequence > self._last:
            raise self._refusal(sequence, f"after {self._last} came {sequence}: messages were lost on the way, greet again")
        if sequence in self._open:
            return Arrival.WAITING
        if sequence in self._answers:
            return Arrival.REPEAT
        raise self._refusal(sequence, f"it repeats {sequence}, which never came or is not among the last {REMEMBERED}: ask anew")

    def answer(self, sequence: int, frames: Sequence[Any], granted: Iterable[tuple[int, int]] = ()) -> None:
        """Keeps an answer and the tickets that it grants; of one with payload only that it was given, since a fetch may be done again."""
        self._open.discard(sequence)
        self._answers[sequence] = list(frames) if len(frames) == 1 else []
        self._granted[sequence] = tuple(granted)
        while len(self._answers) > REMEMBERED:
            del self._granted[self._answers.popitem(last=False)[0]]

    def granted(self) -> list[tuple[int, int]]:
        """Tickets in the answers that are kept, with their attempts: they came, or come when the request is repeated."""
        return [key for keys in self._granted.values() for key in keys]

    def _refusal(self, sequence: int, met: str) -> QueueError:
        """More in a row than a client has on its way, each sent several times, are those of a stranger."""
        self._lost += 1
        kind = LostMessage if self._lost <= MAX_LOST else QueueError
        return kind(f"requests of {self.sender} are numbered without a gap; {met}", sender=self.sender, sequence=sequence)

    def kept(self, sequence: int) -> list[Any]:
        """The answer that was given to a repeated request; empty if it had payload."""
        return self._answers[sequence]


class Sessions:
    """All conversations, by sender.

    Beyond ``limit`` of them the one that has been silent for longest goes; its client greets again by itself.
    """

    def __init__(self, limit: int = MAX_SESSIONS) -> None:
        self._limit = limit
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def greeted(self, envelope: Envelope, identity: bytes) -> Session | None:
        """The session of this very process, if it has said hello already."""
        session = self._sessions.get(envelope.sender)
        return session if session is not None and session.identity == identity else None

    def open(self, envelope: Envelope, identity: bytes, hello: Hello) -> Session:
        """Begins a session; one of the same name ends."""
        session = Session(envelope.sender, identity, hello, envelope.sequence)
        self._sessions.pop(envelope.sender, None)
        self._sessions[envelope.sender] = session
        while len(self._sessions) > self._limit:
            self._sessions.popitem(last=False)
        return session

    def of(self, envelope: Envelope, identity: bytes) -> Session:
        """The session that a request belongs to.

        Raises:
            QueueError: no hello came before, or another process has taken the name.
        """
        session = self._sessions.get(envelope.sender)
        if session is None:
            raise UnknownSession(f"a conversation begins with a hello; {envelope.sender} is not known here: was the queue started again?")
        if session.identity != identity:
            raise QueueError(f"a name belongs to one process; another one has said hello as {envelope.sender} since: end this process")
        self._sessions.move_to_end(envelope.sender)
        return session

    def close(self, sender: str) -> None:
        """Forgets a sender that is gone."""
        self._sessions.pop(sender, None)
