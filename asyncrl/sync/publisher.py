"""The publisher beside the learner: snapshots of the weights, and the thread that brings them to the generators.

The thread consumes snapshots (from :meth:`Publisher.publish`, called by the learner's loop) and messages of receivers, and
produces the phases of every update. It waits for receivers, each time until the deadline of the phase that it waits in; who
unblocks it is the receiver, or that deadline. The learner waits for nothing but the copy of its tensors::

    learner ── publish(version, tensors) ──> snapshot ──┐
                                                        ├──> SyncMachine ── Prepare, Transfer, CommitUpdate, Abort ──> receivers
    receivers ── Join, Prepared, Verified, … ───────────┘

Only in lockstep may ``publish`` wait: when more than ``max_staleness + 1`` snapshots are not committed yet, until the slowest
receiver commits one or the stall deadline passes.

Source: design note, section 6.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.errors import PeerTimeout, SyncError
from asyncrl.sync.machine import Deadlines, Order, SyncMachine
from asyncrl.sync.messages import UpdateManifest
from asyncrl.sync.publisher_socket import PublisherSocket
from asyncrl.sync.snapshots import cast_for_engine, fingerprint, new_manifest
from asyncrl.sync.transports import new_transport

if TYPE_CHECKING:
    import torch

__all__ = ["Publisher"]

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 10.0
WAIT_LOG_EVERY_S = 10.0


class Publisher:
    """Binds ``facts.sync_endpoint`` and distributes published versions in a thread of its own.

    Attributes:
        last_sync_s: seconds from the last publish that every live receiver has committed to that moment; 0.0 before.
        unchanged_publishes: publishes whose tensors all had the checksums of the one before.

    Raises:
        SyncError: the endpoint cannot be bound.
    """

    def __init__(self, config: Config, facts: RunFacts, run_dir: RunDir) -> None:
        self._config = config
        self._facts = facts
        self._hold = config.queue.schedule == "lockstep"
        self._transport = new_transport(config.sync.transport, facts, run_dir)
        self._machine = SyncMachine(_deadlines(config), rolling=config.sync.rolling, hold=self._hold)
        self._changed = threading.Condition()
        self._manifests: dict[int, UpdateManifest] = {}
        self._published_at_s: dict[int, float] = {}
        self._fingerprint = 0
        self._next_id = 1
        self._closing = False
        self._failure: BaseException | None = None
        self.last_sync_s = 0.0
        self.unchanged_publishes = 0
        self._socket = PublisherSocket(facts.sync_endpoint, facts.run_id)
        self._thread = threading.Thread(target=self._run, name="asyncrl-publisher", daemon=True)
        self._thread.start()

    # the learner's side -------------------------------------------------------------------------

    def publish(self, version: int, tensors: Iterator[tuple[str, torch.Tensor]], ties: dict[str, str]) -> None:
        """Copies a snapshot of ``version`` and returns; distribution goes on in the thread.

        Args:
            version: training steps in the weights; rises with every call.
            tensors: Hugging Face names with full tensors; cast to ``model.dtype`` here.
            ties: tied name that is not sent → name that is.

        Raises:
            SyncError: the snapshot cannot be written, a tie is wrong, or the thread has died.
            VersionError: the version does not rise.
            PeerTimeout: in lockstep, no receiver made room before the stall deadline.
        """
        self._wait_for_room(version)
        started_s = time.monotonic()
        update_id = self._next_id
        self._next_id += 1
        snapshot = self._transport.write(update_id, cast_for_engine(tensors, self._config.model.dtype))
        try:
            manifest = new_manifest(self._config, self._facts, snapshot, update_id=update_id, version=version, ties=ties)
            with self._changed:
                self._check_alive()
                orders = self._machine.publish(update_id, version=version, now_s=time.monotonic())
                self._manifests[update_id] = manifest
                self._published_at_s[update_id] = started_s
                self._socket.queue(self._messages(orders))
        except Exception:  # whatever refused it, its segment is freed; the error goes on to the caller
            self._transport.release(snapshot.location)
            raise
        self._watch_for_change(manifest)
        log.info("version %d is ready to travel: %d bytes in %.2f s", version, snapshot.total_bytes, time.monotonic() - started_s)

    @property
    def committed_versions(self) -> dict[str, int]:
        """Version that each receiver serves, by name."""
        with self._changed:
            return self._machine.committed_versions

    @property
    def quarantined(self) -> dict[str, str]:
        """Reason of each receiver that is out until it joins again, by name."""
        with self._changed:
            return dict(self._machine.quarantined)

    def close(self) -> None:
        """Ends the thread, closes the socket and frees every segment."""
        self._closing = True
        self._socket.wake()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("the publisher's thread did not end within %.0f s", CLOSE_TIMEOUT_S)
        self._transport.close()

    # the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as error:  # a thread has no caller: kept and raised by the next publish
            log.exception("the publisher's thread failed")
            self._failure = error
        finally:
            self._socket.close()
            with self._changed:
                self._changed.notify_all()

    def _turn(self) -> None:
        with self._changed:
            deadline_s = self._machine.next_deadline_s()
        timeout_s = 1.0 if deadline_s is None else min(1.0, max(0.0, deadline_s - time.monotonic()))
        events = self._socket.receive(timeout_s)
        with self._changed:
            orders: list[Order] = []
            for event in events:
                orders += event(self._machine, time.monotonic())
            orders += self._machine.tick(now_s=time.monotonic())
            self._socket.queue(self._messages(orders))
            self._free_and_note()
            self._changed.notify_all()
        unreachable = self._socket.send_queued()
        with self._changed:
            for name, update_id, reason in unreachable:
                self._socket.queue(self._messages(self._machine.failed(name, update_id, reason, now_s=time.monotonic())))

    def _messages(self, orders: list[Order]) -> list[tuple[Order, UpdateManifest | None]]:
        for order in orders:
            if order.phase is None:
                log.warning("receiver %s is quarantined until it joins again: %s", order.name, order.reason)
        return [(order, self._manifests.get(order.update_id)) for order in orders]

    def _free_and_note(self) -> None:
        for update_id in [u for u in self._published_at_s if self._machine.settled(u)]:
            self.last_sync_s = time.monotonic() - self._published_at_s.pop(update_id)
            log.info("version %d is committed by every live receiver after %.2f s", self._manifests[update_id].version, self.last_sync_s)
        for update_id in self._machine.prune():
            self._published_at_s.pop(update_id, None)
            self._transport.release(self._manifests.pop(update_id).location)

    # inside -------------------------------------------------------------------------------------

    def _wait_for_room(self, version: int) -> None:
        limit, allowed_s = self._config.queue.max_staleness + 1, self._config.launch.stall_timeout_s
        started_s = time.monotonic()
        with self._changed:
            self._check_alive()
            while self._hold and self._machine.waiting > limit:
                waited_s = time.monotonic() - started_s
                if waited_s > allowed_s:
                    raise PeerTimeout(
                        f"lockstep keeps at most {limit} snapshots waiting; {self._machine.waiting} waited for {waited_s:.0f} s: "
                        f"no receiver commits (serving: {self._machine.committed_versions}, quarantined: {self._machine.quarantined})",
                        policy_version=version,
                        endpoint=self._facts.sync_endpoint,
                    )
                log.info("waiting to publish version %d: %d snapshots are not committed yet", version, self._machine.waiting)
                self._changed.wait(WAIT_LOG_EVERY_S)
                self._check_alive()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise SyncError(f"the publisher's thread failed: {self._failure}") from self._failure
        if self._closing:
            raise SyncError("nothing is published after close()")

    def _watch_for_change(self, manifest: UpdateManifest) -> None:
        fresh = fingerprint(manifest)
        if fresh == self._fingerprint:
            self.unchanged_publishes += 1
            log.error(
                "version %d has the checksums of the version before in all %d tensors: the trained weights are not the published ones",
                manifest.version,
                len(manifest.tensors),
            )
        self._fingerprint = fresh


def _deadlines(config: Config) -> Deadlines:
    sync = config.sync
    return Deadlines(
        prepare_s=sync.prepare_timeout_s,
        transfer_s=sync.transfer_timeout_s,
        commit_s=sync.commit_timeout_s,
        hold_s=config.launch.stall_timeout_s,
    )
