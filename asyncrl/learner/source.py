"""Where a pool's batches come from: the queue, seen from the leader (leases, commits) and from every source rank (payloads).

Consumes leases and payloads of the broker; waits for it in slices of a second, each with the reason in the log every ten.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from asyncrl.config import Config
from asyncrl.config.run_dir import RunFacts
from asyncrl.errors import PeerTimeout
from asyncrl.queue.client import Consumer
from asyncrl.queue.messages import Committed, Lease
from asyncrl.trajectory import GroupMeta, TrajectoryGroup

__all__ = ["BatchSource"]

log = logging.getLogger(__name__)
LEASE_WAIT_S = 0.5
SAY_EVERY_S = 10.0


class BatchSource:
    """The queue as one learner rank uses it.

    Args:
        config, facts: of the run; name: of this rank.

    Raises:
        PeerTimeout: the broker is gone, or no batch came within ``launch.stall_timeout_s``.
        FencedError: a newer learner has taken over. ProcessDied: no generator is left.
    """

    def __init__(self, config: Config, facts: RunFacts, name: str) -> None:
        self._consumer = Consumer.connect(config, facts, name)
        self._stall_s = config.launch.stall_timeout_s
        self._endpoints = ", ".join(facts.queue_endpoints)

    def lease(self, step: int, tick: Callable[[], bool]) -> tuple[Lease | None, str]:
        """The batch of ``step`` and what it waited for last; (None, reason) when ``tick``, asked between waits, says stop."""
        started_s = said_s = time.monotonic()
        blocked = ""
        while not tick():
            lease = self._consumer.lease(step, LEASE_WAIT_S)
            if lease.groups or lease.ended:
                return lease, lease.blocked if lease.ended else blocked
            blocked = lease.blocked
            now_s = time.monotonic()
            if now_s - started_s > self._stall_s:
                raise PeerTimeout(
                    f"a batch comes within launch.stall_timeout_s = {self._stall_s:.0f} s; "
                    f"step {step} got none from {self._endpoints}: {blocked}",
                    endpoint=self._endpoints,
                )
            if now_s - said_s > SAY_EVERY_S:
                said_s = now_s
                log.info("waiting %.0f s for the batch of step %d: %s", now_s - started_s, step, blocked)
        return None, blocked

    def fetch(self, groups: Sequence[GroupMeta]) -> tuple[dict[int, TrajectoryGroup], list[tuple[int, int, str]]]:
        """Payloads of leased groups by ticket, and (ticket, attempt, reason) of those that cannot be used."""
        return self._consumer.fetch(groups)

    def commit(self, step: int) -> Committed:
        """The batch of ``step`` is in the weights."""
        return self._consumer.commit(step)

    def give_back(self, step: int, damaged: Sequence[tuple[int, int, str]] = ()) -> None:
        """The batch of ``step`` is not trained; its ``damaged`` groups are sampled again."""
        for ticket, attempt, reason in damaged:
            log.warning("ticket %d, attempt %d, cannot be trained: %s", ticket, attempt, reason)
        self._consumer.return_(step, damaged)

    def checkpointed(self, oldest_step: int) -> None:
        """No checkpoint of fewer steps can be restored any more."""
        try:
            self._consumer.checkpointed(oldest_step)
        except PeerTimeout as error:  # the checkpoint is there all the same; payload goes at the next one
            log.warning("%s", error)

    def close(self) -> None:
        """Closes the socket."""
        self._consumer.close()
