"""Where a pool's batches come from: the queue, seen from rank 0 (leases, commits) and from every source rank (payloads).

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
from asyncrl.trajectory import TrajectoryGroup

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
        self._endpoint = facts.queue_endpoint

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
                    f"step {step} got none from {self._endpoint}: {blocked}",
                    endpoint=self._endpoint,
                )
            if now_s - said_s > SAY_EVERY_S:
                said_s = now_s
                log.info("waiting %.0f s for the batch of step %d: %s", now_s - started_s, step, blocked)
        return None, blocked

    def fetch(self, tickets: Sequence[int]) -> dict[int, TrajectoryGroup]:
        """Payloads of leased groups by ticket."""
        return dict(zip(tickets, self._consumer.fetch(tickets), strict=True))

    def commit(self, step: int) -> Committed:
        """The batch of ``step`` is in the weights."""
        return self._consumer.commit(step)

    def give_back(self, step: int) -> None:
        """The batch of ``step`` is not trained."""
        self._consumer.return_(step)

    def close(self) -> None:
        """Closes the socket."""
        self._consumer.close()
