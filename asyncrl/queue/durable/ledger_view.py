"""A ledger file as another process sees it: read-only, live or dead; every answer is one consistent read.

Source: design note, section 4, "Durability".
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from asyncrl.errors import DataError, DiskFull, QueueError
from asyncrl.queue.durable.disk import is_full
from asyncrl.queue.durable.row_codec import decode_group_row, decode_step, unseal
from asyncrl.queue.durable.rows import SETTLED, GroupRow, StepRow

__all__ = ["SCHEMA", "LedgerFacts", "LedgerView", "ledger_errors"]

SCHEMA = 1

_ROWS = "SELECT g.ticket, g.state, g.step, g.body, p.body FROM groups g LEFT JOIN payloads p ON p.ticket = g.ticket"
_MAYBE_FULL = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)  # said when the files beside the ledger find no room
_SETTLED = f"g.state IN {SETTLED}"


@contextlib.contextmanager
def ledger_errors(path: Path) -> Iterator[None]:
    """Gives errors of SQLite the file's name and a fix, as errors of this package."""
    try:
        yield
    except UnicodeDecodeError as error:  # SQLite's own message quotes a damaged page
        raise DataError(damaged(path, str(error))) from error
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL or (code in _MAYBE_FULL and is_full(path.parent)):
            raise DiskFull(f"{path} cannot grow ({error}): free space on that disk", folder=str(path.parent)) from error
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise DataError(damaged(path, str(error))) from error
        raise QueueError(f"{path} cannot be used: {error}; is the disk there and writable?") from error


def damaged(path: Path, what: str) -> str:
    """The words for a file that cannot be trusted."""
    return f"{path} is damaged ({what}): move its folder away; the run then starts from its checkpoint, with no group queued"


@dataclass(frozen=True, slots=True)
class LedgerFacts:
    """Whose ledger a file is."""

    run_id: str
    shard: int
    num_shards: int

    def __str__(self) -> str:
        return f"run {self.run_id!r}, shard {self.shard} of {self.num_shards}"


class LedgerView:
    """Reads a ledger file.

    Attributes:
        facts: whose file it is.

    Raises:
        DataError: no ledger, a damaged one, or one of another schema version.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.path = path
        self._connection = connection
        self.facts = self._read_facts()

    @classmethod
    def open(cls, path: Path) -> LedgerView:
        """Opens the file of a live or dead broker; nothing is written."""
        if not path.is_file():
            raise DataError(f"{path} is missing: a queue with queue.durability=memory has no ledger")
        # Without a write-ahead log nobody has the file open, and nothing changes it.
        mode = "mode=ro" if path.with_name(path.name + "-wal").exists() else "mode=ro&immutable=1"
        with ledger_errors(path):
            connection = sqlite3.connect(f"file:{quote(str(path))}?{mode}", uri=True, isolation_level=None, timeout=5.0)
        return cls(connection, path)

    def counts(self) -> dict[str, int]:
        """Rows by state; settled groups below the oldest kept frontier have none."""
        return dict(self.read("SELECT state, COUNT(*) FROM groups GROUP BY state ORDER BY state"))

    def rows(self, state: str | None = None, limit: int | None = None) -> tuple[GroupRow, ...]:
        """Groups in ticket order, of one state if given, at most ``limit``."""
        where, values = (" WHERE g.state = ?", [state]) if state else ("", [])
        found = self.read(f"{_ROWS}{where} ORDER BY g.ticket LIMIT ?", *values, -1 if limit is None else limit)
        return tuple(decode_group_row(*row) for row in found)

    def live_rows(self) -> tuple[GroupRow, ...]:
        """Groups neither trained nor dropped, in ticket order."""
        return tuple(decode_group_row(*row) for row in self.read(f"{_ROWS} WHERE NOT {_SETTLED} ORDER BY g.ticket"))

    def kept_rows(self, before_step: int | None = None) -> tuple[GroupRow, ...]:
        """Settled groups whose payload is kept; with ``before_step`` those committed before it."""
        where = f"WHERE p.ticket IS NOT NULL AND {_SETTLED}" + ("" if before_step is None else " AND g.step < ?")
        values = () if before_step is None else (before_step,)
        return tuple(decode_group_row(*row) for row in self.read(f"{_ROWS} {where} ORDER BY g.ticket", *values))

    def bare_rows(self, from_step: int) -> tuple[GroupRow, ...]:
        """Groups settled in ``from_step`` or later whose payload is not kept."""
        where = f"WHERE p.ticket IS NULL AND {_SETTLED} AND g.step >= ?"
        return tuple(decode_group_row(*row) for row in self.read(f"{_ROWS} {where} ORDER BY g.ticket", from_step))

    def row(self, ticket: int) -> GroupRow | None:
        """The row of a ticket, if there is one."""
        found = self.read(f"{_ROWS} WHERE g.ticket = ?", ticket)
        return decode_group_row(*found[0]) if found else None

    def steps(self) -> tuple[StepRow, ...]:
        """Kept steps, ascending."""
        return tuple(decode_step(*row) for row in self.read("SELECT step, body FROM steps ORDER BY step"))

    def abandoned(self) -> tuple[tuple[int, GroupRow], ...]:
        """Rows that restores gave up, each with the branch that gave it up."""
        found = self.read("SELECT branch, ticket, state, step, body FROM abandoned ORDER BY branch, ticket")
        return tuple((branch, decode_group_row(ticket, state, step, body, None)) for branch, ticket, state, step, body in found)

    def state(self) -> bytes:
        """The small singletons as last written; empty if they never were."""
        return unseal(self.read("SELECT value FROM facts WHERE key = 'state'")[0][0], "the state")

    def branch(self) -> int:
        """Number of restores so far."""
        return int(self.read("SELECT value FROM facts WHERE key = 'branch'")[0][0])

    def check_structure(self) -> None:
        """Looks for pages that do not fit together, which may hide rows. Raises DataError with what was found."""
        found = [line for (line,) in self.read("PRAGMA quick_check(3)")]
        if found != ["ok"]:
            raise DataError(damaged(self.path, "; ".join(found)))

    def close(self) -> None:
        """Frees the file."""
        self._connection.close()

    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Runs one query."""
        with ledger_errors(self.path):
            return self._connection.execute(query, values).fetchall()

    def _read_facts(self) -> LedgerFacts:
        if not self.read("SELECT 1 FROM sqlite_master WHERE name = 'facts'"):
            raise DataError(f"{self.path} is no ledger of a queue: it has no table of facts")
        facts = dict(self.read("SELECT key, value FROM facts"))
        missing = {"schema", "run_id", "shard", "num_shards", "branch", "state"} - set(facts)
        if missing:
            raise DataError(damaged(self.path, f"facts {sorted(missing)} are missing"))
        if facts["schema"] != SCHEMA:
            met = facts["schema"]
            raise DataError(f"{self.path} has schema version {met}; this is {SCHEMA}: use the version of asyncrl that wrote it")
        return LedgerFacts(facts["run_id"], facts["shard"], facts["num_shards"])
