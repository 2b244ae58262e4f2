"""The ledger of one shard: a SQLite file in which each group commit is one transaction.

It consumes :class:`Changes` and produces a :class:`Snapshot` at start; it waits for the disk in :meth:`LedgerFile.write`.
A transition rewrites a small row alone; what belongs to the payload is written once, when it comes. Readers in other processes
(:class:`LedgerView`) neither block the writer nor are blocked.

Source: design note, section 4, "Durability", "Exactly once".
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from asyncrl.errors import AsyncRLError, DataError
from asyncrl.queue.durable.disk import sync_folder
from asyncrl.queue.durable.ledger_view import SCHEMA, LedgerFacts, LedgerView, ledger_errors
from asyncrl.queue.durable.row_codec import encode_group_row, encode_payload, encode_step, seal
from asyncrl.queue.durable.rows import SETTLED, Changes, GroupRow, Snapshot

__all__ = ["LedgerFile"]

WAL_BYTES = 64 << 20
_TABLES = (
    "CREATE TABLE facts (key TEXT PRIMARY KEY, value) WITHOUT ROWID",
    "CREATE TABLE groups (ticket INTEGER PRIMARY KEY, state TEXT NOT NULL, step INTEGER NOT NULL, body BLOB NOT NULL)",
    "CREATE TABLE payloads (ticket INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    "CREATE TABLE steps (step INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    "CREATE TABLE abandoned (branch INTEGER, ticket INTEGER, state TEXT NOT NULL, step INTEGER NOT NULL, body BLOB NOT NULL, "
    "PRIMARY KEY (branch, ticket)) WITHOUT ROWID",
)


class LedgerFile:
    """Writer of one ledger file.

    Args:
        synced: each transaction waits for the disk and survives a power loss; otherwise it survives the death of the process.

    Attributes:
        created: whether the file was made by this object.

    Raises:
        DataError: the file is damaged, of another schema version, run, shard or number of shards.

    Example:
        >>> ledger = LedgerFile(folder / "ledger.sqlite", "r1", 0, 1)                      # doctest: +SKIP
        >>> ledger.write(Changes(groups=(GroupRow(ticket=0, attempt=0, state="generating"),)))  # doctest: +SKIP
        >>> ledger.load().live[0].state                                                    # doctest: +SKIP
        'generating'
    """

    def __init__(self, path: Path, run_id: str, shard: int, num_shards: int, *, synced: bool = False) -> None:
        self.path = path
        self._written: dict[int, GroupRow] = {}  # rows whose payload facts are in the file as they stand here
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = LedgerFacts(run_id, shard, num_shards)
        with ledger_errors(path):
            self._connection = sqlite3.connect(path, isolation_level=None, timeout=5.0)
        try:
            self._begin(facts, synced)
        except (AsyncRLError, OSError):
            self.close()
            raise

    @staticmethod
    def open_readonly(path: Path) -> LedgerView:
        """The file for inspection, while its broker lives or afterwards. Raises DataError if it is not there or damaged."""
        return LedgerView.open(path)

    def write(self, changes: Changes) -> None:
        """All of it or nothing, in one transaction: abandoned, groups, forget, steps, state, in this order.

        Raises:
            DiskFull: nothing was written. QueueError: the disk failed otherwise.
        """
        with self._transaction():
            self._apply(changes)
        self._remember(changes)

    def begin_branch(self, steps: int, changes: Changes) -> int:
        """A restore to ``steps`` committed steps: later ones are deleted, ``changes`` written, the new branch returned.

        ``changes.groups`` are all live groups: what was being sampled is live no more.

        Raises:
            DiskFull: nothing was written. QueueError: the disk failed otherwise.
        """
        branch = self._view.branch() + 1
        with self._transaction():
            self._connection.execute("UPDATE facts SET value = ? WHERE key = 'branch'", (branch,))
            self._connection.execute("DELETE FROM steps WHERE step >= ?", (steps,))
            self._connection.execute("DELETE FROM groups WHERE state IN ('generating', 'reissue')")
            self._apply(changes)
        self._remember(changes)
        return branch

    def steps_kept_from(self, steps: int) -> tuple[GroupRow, ...]:
        """The oldest checkpoint that may be restored holds ``steps`` committed steps: what only an older one needs goes.

        Payload facts of groups committed in a step before ``steps`` are deleted, and those rows returned as they were, so that
        their payload can be released. Of the steps, ``steps - 1`` (its frontier is the restored one) and later ones stay; rows
        settled below that frontier's ``low`` are deleted.
        """
        freed = self._view.kept_rows(before_step=steps)
        low = next((row.frontier.low for row in self._view.steps() if row.step == steps - 1), 0)
        with self._transaction():
            self._connection.executemany("DELETE FROM payloads WHERE ticket = ?", [(row.ticket,) for row in freed])
            self._connection.execute("DELETE FROM steps WHERE step < ?", (steps - 1,))
            self._connection.execute(f"DELETE FROM groups WHERE ticket < ? AND step < ? AND state IN {SETTLED}", (low, steps))
        for row in freed:
            self._written.pop(row.ticket, None)
        return freed

    def load(self) -> Snapshot | None:
        """What the file holds; None if nothing was ever written.

        Raises:
            DataError: the file or a row is damaged. A group whose payload facts alone are damaged comes without them.
        """
        self._view.check_structure()
        live, steps, state, branch = self._view.live_rows(), self._view.steps(), self._view.state(), self._view.branch()
        kept = tuple(row for row in self._view.kept_rows() if row.has_payload)
        if not (live or kept or steps or state or branch or self._view.counts()):
            return None
        self._written = {row.ticket: row for row in (*live, *kept) if row.meta is not None}
        bare = self._view.bare_rows(from_step=min((row.step for row in steps), default=0))
        return Snapshot(live=live, kept=kept, steps=steps, state=state, branch=branch, bare=bare)

    def close(self) -> None:
        """Frees the file; what was written stays."""
        self._connection.close()

    def discard(self) -> None:
        """Removes a file that this object made and that nothing was written to."""
        assert self.created and self.load() is None, "only an empty ledger is discarded"
        self.close()
        self.path.unlink()

    def _begin(self, facts: LedgerFacts, synced: bool) -> None:
        with ledger_errors(self.path):
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
            self._connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
            self.created = not self._connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        if self.created:
            self._create(facts)
            if synced:
                sync_folder(self.path.parent)
        self._view = LedgerView(self._connection, self.path)
        if self._view.facts != facts:
            raise DataError(f"{self.path} belongs to {self._view.facts}; this is {facts}: use a folder of its own for each")

    def _create(self, facts: LedgerFacts) -> None:
        values = {"schema": SCHEMA, "run_id": facts.run_id, "shard": facts.shard, "num_shards": facts.num_shards}
        values |= {"branch": 0, "state": seal(b"")}
        with self._transaction():
            for table in _TABLES:
                self._connection.execute(table)
            self._connection.executemany("INSERT INTO facts VALUES (?, ?)", list(values.items()))

    def _apply(self, changes: Changes) -> None:
        many = self._connection.executemany
        if changes.abandoned:
            branch = self._view.branch()
            rows = [(branch, row.ticket, row.state, row.step, encode_group_row(row)) for row in changes.abandoned]
            many("INSERT OR REPLACE INTO abandoned VALUES (?, ?, ?, ?, ?)", rows)
            gone = [(row.ticket,) for row in changes.abandoned]
            many("DELETE FROM groups WHERE ticket = ?", gone)
            many("DELETE FROM payloads WHERE ticket = ?", gone)
        given_up = {row.ticket for row in changes.abandoned}
        groups = [(row.ticket, row.state, row.step, encode_group_row(row)) for row in changes.groups]
        many("INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?)", groups)
        new = [row for row in changes.groups if row.meta is not None and (row.ticket in given_up or not self._is_written(row))]
        many("INSERT OR REPLACE INTO payloads VALUES (?, ?)", [(row.ticket, encode_payload(row)) for row in new])
        bare = [(row.ticket,) for row in changes.groups if row.meta is None]
        many("DELETE FROM payloads WHERE ticket = ?", bare + [(ticket,) for ticket in changes.forget])
        many("INSERT OR REPLACE INTO steps VALUES (?, ?)", [(row.step, encode_step(row)) for row in changes.steps])
        if changes.state:
            self._connection.execute("UPDATE facts SET value = ? WHERE key = 'state'", (seal(changes.state),))

    def _is_written(self, row: GroupRow) -> bool:
        known = self._written.get(row.ticket)
        if known is None or known.attempt != row.attempt or known.place != row.place or known.segment != row.segment:
            return False
        return known.meta is row.meta and known.checksum == row.checksum and known.lengths == row.lengths

    def _remember(self, changes: Changes) -> None:
        for row in changes.abandoned:
            self._written.pop(row.ticket, None)
        for row in changes.groups:
            if row.meta is None:
                self._written.pop(row.ticket, None)
            else:
                self._written[row.ticket] = row
        for ticket in changes.forget:
            self._written.pop(ticket, None)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with ledger_errors(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:  # whatever went wrong, the transaction must not stay open; it is raised again
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
