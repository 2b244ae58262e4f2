"""What must hold of a run directory when all deaths are over.

Consumes the ledger, the weights and the acknowledgements; produces sentences, none when all is well:

    weights    each settled ticket with a signal once, and no other
    promises   each acknowledged attempt is in the weights, waits in the queue, was given up by a restore, or had no signal
    counts     admitted = trained + sum(dropped) + in flight, in the ledger and in the broker's last status

Source: design note, section 4, "Exactly once".
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.config.run_dir import RunDir
from asyncrl.queue.durable.rows import GroupRow
from asyncrl.queue.inspect import LIVE, ShardFiles
from asyncrl.queue.messages import DropReason, Frontier, QueueStatus
from asyncrl.queue.verify import verify
from benchmarks.queue_kill_roles import Weights, has_signal

__all__ = ["Tally", "check"]


@dataclass(slots=True, kw_only=True)
class Tally:
    """What happened and what does not hold; ``points_s`` until the last death, ``seconds`` with the end and the checks."""

    seed: int
    killed: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    steps: int = 0
    trained: int = 0
    abandoned: int = 0
    left: int = 0
    reissued: int = 0
    points_s: float = 0.0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    def line(self) -> str:
        """One line of figures."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.killed.items()))
        outcomes = ", ".join(f"{count} {kind}" for kind, count in sorted(self.outcomes.items()))
        each_s = self.points_s / max(1, self.killed.total())
        return (
            f"{self.killed.total()} deaths ({kinds}) in {self.seconds:.1f} s, {each_s:.2f} s each; {self.steps} steps; {outcomes}; "
            f"{self.acknowledged} attempts acknowledged; {self.trained} groups trained once, {self.abandoned} given up by restores, "
            f"{self.left} left in the queue, {self.reissued} reissued; {len(self.problems)} problems; seed {self.seed}"
        )


def check(run_dir: RunDir, status: QueueStatus, tally: Tally) -> None:
    """Adds what does not hold to the tally, and its counts."""
    files = ShardFiles(run_dir.queue / "shard-0")
    state, weights = files.state(), Weights.load(run_dir.path)
    rows = {row.ticket: row for row in files.view.rows()}
    given_up = {(row.ticket, row.attempt) for _, row in files.view.abandoned()}
    promised = _acknowledged(run_dir.path, tally)
    if state is None:
        tally.problems.append("the ledger has no state")
        return
    live = {ticket: row for ticket, row in rows.items() if row.state in LIVE}
    tally.acknowledged, tally.steps, tally.trained = len(promised), state.frontier.steps, state.frontier.trained
    tally.abandoned, tally.left, tally.reissued = len(given_up), len(live), status.reissued
    verdict = verify([files])
    tally.problems += verdict.damage + verdict.miscounts
    tally.problems += _weights(weights, state.frontier)
    tally.problems += _promises(promised, weights, live, given_up, _settled(state.frontier))
    tally.problems += _counts(status, state.frontier, len(live))


def _settled(frontier: Frontier) -> set[int]:
    return set(range(frontier.low)) | set(frontier.settled_above)


def _acknowledged(folder: Path, tally: Tally) -> set[tuple[int, int]]:
    """Attempts that a producer was told the queue has; one that is accepted twice is a problem."""
    accepted: Counter[tuple[int, int]] = Counter()
    promised = set()
    for file in [*sorted(folder.glob("acks-*.jsonl")), folder / "consumer.jsonl"]:
        for line in file.read_text().splitlines():
            outcome, *key = json.loads(line)
            tally.outcomes[outcome.partition(":")[0]] += 1
            if outcome in ("accepted", "duplicate", "no_signal"):
                promised.add((key[0], key[1]))
                accepted[key[0], key[1]] += outcome == "accepted"
    twice = [key for key, count in accepted.items() if count > 1]
    if twice:
        tally.problems.append(f"{len(twice)} attempts were accepted more than once: {twice[:8]}")
    return promised


def _weights(weights: Weights, frontier: Frontier) -> Iterator[str]:
    trained = Counter(ticket for ticket, _ in weights.trained)
    due = {ticket for ticket in _settled(frontier) if has_signal(ticket)}
    last = weights.frontier  # what has no signal may be settled after the last commit
    if (last.steps, last.trained) != (frontier.steps, frontier.trained) or not _settled(last) <= _settled(frontier):
        yield f"the last checkpoint and the ledger agree on the frontier; met {last} and {frontier}"
    for name, tickets in (
        ("were trained twice", {ticket for ticket, count in trained.items() if count > 1}),
        ("were trained and are not settled", set(trained) - due),
        ("are settled and were not trained", due - set(trained)),
    ):
        if tickets:
            yield f"{len(tickets)} tickets {name}: {sorted(tickets)[:8]}"
    if frontier.trained != len(due):
        yield f"the ledger counts {frontier.trained} trained groups; {len(due)} tickets with a signal are settled"
    unexpected = set(frontier.dropped) - {DropReason.NO_SIGNAL, DropReason.ABANDONED}
    if unexpected:
        yield f"groups were dropped as {sorted(unexpected)}: {frontier.dropped}"


def _promises(
    promised: set[tuple[int, int]],
    weights: Weights,
    live: dict[int, GroupRow],
    given_up: set[tuple[int, int]],
    settled: set[int],
) -> Iterator[str]:
    kept = set(weights.trained) | given_up
    kept |= {(row.ticket, row.attempt) for row in live.values() if row.state in ("queued", "leased")}
    kept |= {key for key in promised if key[0] in settled and not has_signal(key[0])}
    lost = sorted(promised - kept)
    if lost:
        rows = [live.get(ticket) for ticket, _ in lost[:3]]
        yield f"{len(lost)} acknowledged attempts are neither trained, waiting, nor given up: {lost[:8]}, live {rows}"


def _counts(status: QueueStatus, frontier: Frontier, live: int) -> Iterator[str]:
    if status.admitted != status.trained + sum(status.dropped.values()) + status.in_flight:
        yield f"admitted = trained + dropped + in flight; met {status}"
    if (status.trained, status.dropped, status.in_flight) != (frontier.trained, frontier.dropped, live):
        yield f"status and ledger agree; met {status} and {frontier} with {live} live rows"
