"""The receiver inside a generator: joins the publisher, answers the phases of every update, loads the engine.

It consumes messages of the publisher and produces committed versions. It waits for the publisher (until ``join_timeout_s``
when joining or cut off, without end while it serves: an update comes when one is due, and the socket's monitor tells when the
publisher is gone) and, for a held update, for the rollout loop's :meth:`Receiver.advance`::

    Join ──> Prepare: engine.check ──> Transfer: checksums, in a thread ──> CommitUpdate: [hold: advance] engine.load
     ^                                                                                          │
     └── Abort, a failed phase, or a new publisher <────────────────────────────────────────────┴──> ready

After an Abort or a failed phase ``ready`` is cleared: no ticket may be asked for until a full update is committed again.

Source: design note, section 6.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from asyncrl.errors import AsyncRLError, PeerTimeout, SyncError, VersionError
from asyncrl.sync.checksums import verify_checksums
from asyncrl.sync.messages import (
    SYNC_PROTOCOL_VERSION,
    Abort,
    CommittedUpdate,
    CommitUpdate,
    FailedUpdate,
    Join,
    Prepare,
    Prepared,
    ToPublisher,
    ToReceiver,
    Transfer,
    UpdateManifest,
    Verified,
)
from asyncrl.sync.receiver_socket import connected_dealer, next_connected

__all__ = ["Receiver", "UpdatedEngine"]

log = logging.getLogger(__name__)
RETRY_JOIN_S = 10.0
POLL_S = 1.0
MAX_FAILURES = 5
BACK_OFF_S = 0.5


class UpdatedEngine(Protocol):
    """What a receiver needs of an engine; see :class:`asyncrl.generators.engine.GeneratorEngine`."""

    version: int

    async def check(self, manifest: UpdateManifest) -> None:
        """Raises SyncError unless names, shapes and dtypes fit the model."""

    async def load(self, manifest: UpdateManifest) -> float:
        """Loads the verified bytes and stamps the version; seconds paused."""


class Receiver:
    """One generator's end of the sync module. ``run`` is a task that its owner awaits.

    Args:
        endpoint: the publisher's address; run_id, incarnation: of the run, others are refused.
        name: of the generator, unique in the run.
        engine: whose weights are replaced.
        join_timeout_s: how long a publisher may be missing.

    Attributes:
        ready: set while the engine serves a committed version. committed: set at every commit; whoever waits clears it.
    """

    def __init__(self, endpoint: str, run_id: str, incarnation: int, name: str, engine: UpdatedEngine, *, join_timeout_s: float) -> None:
        self._endpoint = endpoint
        self._run_id = run_id
        self._incarnation = incarnation
        self._name = name
        self._engine = engine
        self._join_timeout_s = join_timeout_s
        self._manifest: UpdateManifest | None = None
        self._advanced_past = -1
        self._advanced = asyncio.Event()
        self._joined_at_s = 0.0
        self._asked_at_s = 0.0
        self._failures = 0
        self._decoder: msgspec.msgpack.Decoder[ToReceiver] = msgspec.msgpack.Decoder(ToReceiver)
        self.ready = asyncio.Event()
        self.committed = asyncio.Event()
        self.paused_s = 0.0

    def advance(self, version: int) -> None:
        """Lockstep: no further ticket asks for ``version``; an update beyond it may commit."""
        self._advanced_past = max(self._advanced_past, version)
        self._advanced.set()

    async def run(self) -> None:
        """Joins and serves until cancelled.

        Raises:
            PeerTimeout: the publisher is missing for longer than ``join_timeout_s``.
            EngineError: the engine died under an update.
            SyncError: ``MAX_FAILURES`` updates in a row failed here.
        """
        context = zmq.asyncio.Context()
        dealer = connected_dealer(context, self._endpoint, self._name)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        watcher = asyncio.create_task(self._watch(monitor, dealer))
        try:
            await self._join(dealer)
            await self._serve(dealer)
        finally:
            watcher.cancel()
            await asyncio.wait([watcher])
            dealer.disable_monitor()
            monitor.close(linger=0)
            dealer.close()
            context.term()

    # messages -----------------------------------------------------------------------------------

    async def _serve(self, dealer: zmq.asyncio.Socket) -> None:
        work: asyncio.Task[None] | None = None
        try:
            while True:
                message = await self._next(dealer)
                if work is not None and work.done():
                    work = work.result()
                if message is None:
                    await self._check_joined(dealer)
                elif isinstance(message, Abort):
                    await self._drop(work)
                    work = None
                    log.warning("update %d is aborted by the publisher: %s; joining again", message.update_id, message.reason)
                    await asyncio.sleep(self._failures * BACK_OFF_S)
                    await self._join(dealer)
                else:
                    await self._drop(work)
                    work = asyncio.create_task(self._phase(dealer, message))
        finally:
            await self._drop(work)

    async def _next(self, dealer: zmq.asyncio.Socket) -> ToReceiver | None:
        if not await dealer.poll(POLL_S * 1000):
            return None
        frames = await dealer.recv_multipart()
        try:
            (frame,) = frames
            return self._decoder.decode(frame)
        except (ValueError, msgspec.MsgspecError) as error:
            log.warning("a frame of %s is refused: not one sync message: %s", self._endpoint, error)
            return None

    async def _drop(self, work: asyncio.Task[None] | None) -> None:
        """Ends the running phase: a held commit gives up, an engine in the middle of a load finishes it."""
        if work is None:
            return
        work.cancel()
        await asyncio.wait([work])
        if not work.cancelled():
            work.result()

    async def _phase(self, dealer: zmq.asyncio.Socket, message: ToReceiver) -> None:
        phase = {Prepare: "prepare", Transfer: "transfer", CommitUpdate: "commit"}[type(message)]
        update_id = message.manifest.update_id if isinstance(message, Prepare) else message.update_id
        try:
            await self._send(dealer, await self._answer(message, update_id))
        except AsyncRLError as error:
            self.ready.clear()
            self._failures += 1
            log.error("%s of update %d failed: %s", phase, update_id, error)
            await self._send(dealer, FailedUpdate(name=self._name, update_id=update_id, phase=phase, reason=str(error)))
            if self._failures >= MAX_FAILURES or not isinstance(error, (SyncError, VersionError)):
                raise

    async def _answer(self, message: ToReceiver, update_id: int) -> ToPublisher:
        if isinstance(message, Prepare):
            self._joined_at_s = 0.0
            self._check(message.manifest)
            await self._engine.check(message.manifest)
            self._manifest = message.manifest
            return Prepared(name=self._name, update_id=update_id)
        manifest = self._manifest
        if manifest is None or manifest.update_id != update_id:
            raise SyncError(f"update {update_id} was not prepared here")
        if isinstance(message, Transfer):
            await asyncio.to_thread(verify_checksums, manifest)
            return Verified(name=self._name, update_id=update_id)
        return await self._commit(manifest)

    async def _commit(self, manifest: UpdateManifest) -> ToPublisher:
        while manifest.hold and 0 <= self._engine.version < manifest.version and self._advanced_past < self._engine.version:
            self._advanced.clear()
            await self._advanced.wait()  # the publisher's deadline ends it: its Abort cancels this phase
        load = asyncio.ensure_future(self._engine.load(manifest))
        try:
            self.paused_s = await asyncio.shield(load)
        except asyncio.CancelledError:
            await load
            raise
        self._failures = 0
        self.ready.set()
        self.committed.set()
        log.info("version %d is committed; the engine stood still for %.3f s", manifest.version, self.paused_s)
        return CommittedUpdate(name=self._name, update_id=manifest.update_id, version=manifest.version, paused_s=self.paused_s)

    def _check(self, manifest: UpdateManifest) -> None:
        if manifest.incarnation != self._incarnation:
            raise SyncError(f"updates are of incarnation {self._incarnation}; met {manifest.incarnation}: restart the generator")
        if manifest.version < self._engine.version:
            raise VersionError(
                f"within an incarnation versions only rise; met {manifest.version} after {self._engine.version}",
                policy_version=manifest.version,
            )

    # joining ------------------------------------------------------------------------------------

    async def _join(self, dealer: zmq.asyncio.Socket) -> None:
        self.ready.clear()
        self._manifest = None
        self._asked_at_s = time.monotonic()
        self._joined_at_s = self._joined_at_s or self._asked_at_s
        await self._send(dealer, Join(protocol=SYNC_PROTOCOL_VERSION, run_id=self._run_id, name=self._name))

    async def _check_joined(self, dealer: zmq.asyncio.Socket) -> None:
        if not self._joined_at_s:
            return
        now_s = time.monotonic()
        if now_s - self._joined_at_s > self._join_timeout_s:
            raise PeerTimeout(
                f"the publisher at {self._endpoint} sent no weights within {self._join_timeout_s:.0f} s of joining: is the learner up?",
                endpoint=self._endpoint,
            )
        if now_s - self._asked_at_s > RETRY_JOIN_S:
            log.info("waiting for the publisher at %s since %.0f s", self._endpoint, now_s - self._joined_at_s)
            await self._join(dealer)

    async def _watch(self, monitor: zmq.asyncio.Socket, dealer: zmq.asyncio.Socket) -> None:
        """Notes a lost connection and joins again over the next one: the publisher behind it may be a new one."""
        lost = False
        while True:
            if not await next_connected(monitor):
                lost = True
                self._joined_at_s = self._joined_at_s or time.monotonic()
                log.warning("the connection to the publisher at %s is lost", self._endpoint)
            elif lost:
                lost = False
                await self._join(dealer)

    async def _send(self, dealer: zmq.asyncio.Socket, message: ToPublisher) -> None:
        await dealer.send(msgspec.msgpack.encode(message))
