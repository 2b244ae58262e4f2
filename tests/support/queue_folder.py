"""A queue's run directory, written by the broker's own parts without a socket."""

from __future__ import annotations

import time
import zlib
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.queue.messages import PutItem
from asyncrl.queue.opening import Opened, open_queue
from asyncrl.queue.payload import checksum, frame_lengths
from asyncrl.queue.records import Issue
from asyncrl.queue.settings import GateSettings
from asyncrl.trajectory import Trajectory, TrajectoryGroup, VersionSpan, encode_group_frames


class QueueFolder:
    """One shard of a queue, in this process; ``commit`` writes what happened."""

    def __init__(self, path: Path, shard: int = 0, **queue: Any) -> None:
        self.run_dir = RunDir(path)
        path.mkdir(parents=True, exist_ok=True)
        options = {"algorithm": {"groups_per_step": 2}, "queue": {"max_staleness": 4, "max_attempts": 2, **queue}}
        self.config = Config.model_validate(options)
        self.run_dir.write_config(self.config)
        self.facts = RunFacts(
            run_id=f"f{zlib.crc32(str(path).encode()):08x}",
            incarnation=0,
            queue_endpoints=tuple(f"ipc://{path}/q{number}" for number in range(self.config.queue.shards)),
            sync_endpoint=f"ipc://{path}/s",
            rendezvous="",
            model_dir="",
            generator_device="cpu",
            learner_device="cpu",
        )
        self.run_dir.write_facts(self.facts)
        settings = GateSettings.from_config(self.config, None, shard)
        self.opened: Opened = open_queue(self.run_dir, self.config, self.facts, settings, None)
        self.gate = self.opened.gate
        self.gate.hello("generator-0", 0.0)
        self._closed = False

    def issue(self, number: int = 1) -> list[int]:
        """Tickets given to generator-0."""
        found = [self.gate.issue("generator-0", 0, 0.0) for _ in range(number)]
        assert all(isinstance(issue, Issue) for issue in found), found
        return [issue.ticket for issue in found if isinstance(issue, Issue)]

    def finish(self, ticket: int, rewards: tuple[float, ...] = (0.0, 1.0), age_s: float = 5.0) -> str:
        """The ticket's group comes, finished ``age_s`` ago."""
        attempt = next(record.attempt for record in self.gate.live() if record.ticket == ticket)
        group = small_group(ticket, attempt, rewards, time.time() - age_s)
        frames = encode_group_frames(group)
        lengths = frame_lengths(frames)
        item = PutItem(meta=group.meta(payload_bytes=sum(lengths)), checksum=checksum(frames), lengths=lengths)
        self.opened.store.keep(ticket, attempt, item, frames)
        outcome = self.gate.finish("generator-0", item.meta, 0.0)
        if outcome != "accepted":
            self.opened.store.settle(ticket, retain=False)
        return outcome

    def train(self, step: int) -> None:
        """One batch is leased and committed."""
        self.gate.lease(step, 0, 0.0)
        self.gate.commit(step, 0)

    def commit(self) -> None:
        """Writes everything up to now."""
        for settled in self.gate.take_settled():
            self.opened.journal.settled(settled)
        self.opened.journal.commit(self.gate, 0)

    def close(self) -> None:
        """What a broker does at its end; once is enough."""
        if not self._closed:
            self._closed = True
            self.opened.journal.close()
            self.opened.store.close()


def small_group(ticket: int, attempt: int, rewards: tuple[float, ...], finished_s: float) -> TrajectoryGroup:
    """Siblings of two prompt tokens and three sampled ones of version 0."""
    columns: dict[str, Any] = {
        "group_id": f"g{ticket}",
        "ticket": ticket,
        "attempt": attempt,
        "sample": 0,
        "prompt_id": "p",
        "seed": 1,
        "incarnation": 0,
        "input_ids": [1, 2, 3, 4, 5],
        "loss_mask": [False, False, True, True, True],
        "behavior_logprobs": [0.0, 0.0, -0.5, -0.5, -0.5],
        "version_spans": [VersionSpan(2, 0)],
        "finish_reason": "stop",
        "temperature": 1.0,
        "generator": "generator-0",
        "engine": "fake",
        "dispatched_s": finished_s - 1.0,
        "finished_s": finished_s,
    }
    return TrajectoryGroup(trajectories=tuple(Trajectory.checked(**columns, sibling=i, reward=r) for i, r in enumerate(rewards)))
