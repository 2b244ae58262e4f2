"""Every message between the broker and its clients; with the trajectory schema, all that they share.

A request is one msgpack header frame (:class:`Request`) and, for :class:`Put`, the payload frames of the groups
that travel inline, in order. A reply is one :class:`Reply` frame and, for :class:`Payloads`, payload frames
likewise. The frames of a group, put end to end, are one Arrow IPC stream. A consumer that pulls a payload from its
producer sends a :class:`Pull` and gets a :class:`Pulled`. Requests carry a per-sender sequence number that rises by
one; the broker refuses a gap and answers a repeat from memory. Numbers of requests are bounded when they are decoded
(:mod:`asyncrl.bounds`).

Source: design note, sections 3 and 4.
"""

from __future__ import annotations

import enum

import msgspec

from asyncrl.bounds import Address, Checksum, Count, Priority, Seconds, TokensByVersion, TotalTokens
from asyncrl.trajectory import SCHEMA_VERSION, GroupMeta

PROTOCOL_VERSION = 3


class DropReason(enum.StrEnum):
    """Why an admitted group was never trained."""

    NO_SIGNAL = "no_signal"
    DEAD_LETTER = "dead_letter"
    LAST_BATCH = "last_batch"
    UNUSABLE = "unusable"
    STALE = "stale"
    ABANDONED = "abandoned"


class Role(enum.StrEnum):
    """What a client is to the broker."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    OBSERVER = "observer"


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Leave to sample one group.

    ``prompt`` is text or chat messages (JSON of a list of {role, content}); ``answer`` and ``extra`` (JSON)
    go to the reward. ``not_before_version`` is the lowest version that may sample any token of it;
    in lockstep ``exact_version`` is the only one (-1: not in lockstep).
    """

    ticket: int
    group_id: str
    attempt: int
    prompt_id: str
    prompt: str
    is_chat: bool
    answer: str
    extra: str
    seed: int
    deadline_s: float
    not_before_version: int
    exact_version: int = -1


class Frontier(msgspec.Struct, frozen=True, kw_only=True):
    """What is settled for good: every ticket below ``low`` and those listed above it.

    ``steps`` training steps are committed; ``trained`` and ``dropped`` count groups, ``admitted`` their sum.
    """

    steps: Count
    low: Count
    settled_above: tuple[Count, ...]
    trained: Count
    dropped: dict[str, Count]


class LagHistogram(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens by lag in versions: of the last committed batch as it was leased, in flight, and in the queue."""

    consumed: dict[int, int]
    in_flight: dict[int, int]
    queued: dict[int, int]


class QueueStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the moment. ``admitted = trained + sum(dropped) + in_flight`` holds in each.

    ``oldest_queued_s``: how long the oldest finished group has waited, in seconds. ``log_bytes``: on disk, 0 without a log.
    """

    step: int
    admitted: int
    trained: int
    dropped: dict[str, int]
    in_flight: int
    generating: int
    queued_groups: int
    queued_bytes: int
    oldest_queued_s: float
    leased: int
    reissued: int
    lag: LagHistogram
    generator_tokens: int
    rewards_sum: float
    rewards_count: int
    refused: dict[str, int]
    blocked: str
    producers: dict[str, int]
    stopping: bool
    log_bytes: int = 0


# requests -----------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First message of a client; a consumer's incarnation fences every older one.

    ``again``: the same process has said hello before, to a broker that is gone; a producer keeps ``tickets``, the (ticket, attempt)
    that it holds. Others that were issued to it never came, since the broker died with the answer, and are issued again.
    ``restore``: a consumer that starts from an older checkpoint takes the queue back to this frontier.
    """

    role: Role
    incarnation: Count = 0
    schema: Count = SCHEMA_VERSION
    again: bool = False
    tickets: tuple[tuple[Count, Count], ...] = ()
    restore: Frontier | None = None


class TicketRequest(msgspec.Struct, frozen=True, kw_only=True, tag="ticket_request"):
    """Up to ``max_tickets`` tickets for a producer that has committed ``version``; waits up to ``wait_s``."""

    version: Count
    max_tickets: Count
    wait_s: Seconds


class PutItem(msgspec.Struct, frozen=True, kw_only=True):
    """One finished group: what planning needs, and where its payload is.

    ``checksum`` is xxh3-64 over the payload, ``lengths`` the bytes of its frames. They follow the header, unless
    ``segment`` names the shared-memory segment that holds them end to end, or what the producer hands out under that name at the
    address ``source``.
    """

    meta: GroupMeta
    checksum: Checksum
    lengths: tuple[Count, ...]
    segment: str = ""
    source: Address = ""


class Put(msgspec.Struct, frozen=True, kw_only=True, tag="put"):
    """Finished groups. Idempotent by (ticket, attempt)."""

    groups: tuple[PutItem, ...]


class Fail(msgspec.Struct, frozen=True, kw_only=True, tag="fail"):
    """A ticket that could not be finished; ``final`` drops it as unusable instead of issuing it again."""

    ticket: Count
    attempt: Count
    reason: str
    final: bool = False


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """A producer is alive: its committed version, tokens in flight by version, tokens sampled so far."""

    version: Count
    in_flight: TokensByVersion
    sampled_tokens: TotalTokens


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True, tag="lease_request"):
    """The batch of training step ``step``; waits up to ``wait_s``. Asking twice returns the same lease.

    ``extra``: groups beyond this shard's share that may fill the place of others; they are never waited for.
    """

    step: Count
    incarnation: Count
    wait_s: Seconds
    extra: Count = 0


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Payloads of leased groups; with ``files`` the consumer reads files of the broker's log itself."""

    tickets: tuple[Count, ...]
    files: bool = False


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag="commit"):
    """Training step ``step`` is in the weights. Idempotent by (incarnation, step).

    ``priorities`` of tickets that are used again, for ``queue.order=prioritised``.
    """

    step: Count
    incarnation: Count
    priorities: dict[Count, Priority] = {}


class Return(msgspec.Struct, frozen=True, kw_only=True, tag="return"):
    """Gives the lease of ``step`` back untrained.

    ``damaged``: groups whose payload did not agree with its checksum or its metadata, with the reason; they are issued again.
    """

    step: Count
    incarnation: Count
    damaged: tuple[tuple[Count, Count, str], ...] = ()


class Checkpointed(msgspec.Struct, frozen=True, kw_only=True, tag="checkpointed"):
    """No checkpoint older than ``oldest_step`` will be restored: payload kept for it can go."""

    oldest_step: Count
    incarnation: Count


class ProducerGone(msgspec.Struct, frozen=True, kw_only=True, tag="producer_gone"):
    """The supervisor saw this producer die: its tickets are issued again at once."""

    name: str


class StatusRequest(msgspec.Struct, frozen=True, kw_only=True, tag="status_request"):
    """Asks for :class:`QueueStatus`."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """No more tickets from now on; with ``exit``, answer and end the broker."""

    exit: bool = False


RequestBody = (
    Hello
    | TicketRequest
    | Put
    | Fail
    | Heartbeat
    | LeaseRequest
    | Fetch
    | Commit
    | Return
    | Checkpointed
    | ProducerGone
    | StatusRequest
    | Stop
)

# replies ------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The client is known; the next sequence number it must send is 1. ``frontier``: what this shard has settled so far."""

    protocol: int
    frontier: Frontier


class Tickets(msgspec.Struct, frozen=True, kw_only=True, tag="tickets"):
    """Tickets, or none with the reason; ``advance``: in lockstep, no further ticket will ask for this version;
    ``stopping``: none will come any more."""

    tickets: tuple[Ticket, ...]
    blocked: str = ""
    advance: bool = False
    stopping: bool = False


class Outcomes(msgspec.Struct, frozen=True, kw_only=True, tag="outcomes"):
    """What became of each group put: accepted, duplicate, late, no_signal, stale, ``refused: REASON``, or ``held: REASON``.

    Held: nothing was taken, and the same group is to be put again. ``released``: segments of the sender that may be written again.
    """

    outcomes: tuple[str, ...]
    released: tuple[str, ...] = ()


class Lease(msgspec.Struct, frozen=True, kw_only=True, tag="lease"):
    """Groups of one training step in training order. Empty with ``blocked`` while not ready; ``ended``: no more will come."""

    step: int
    groups: tuple[GroupMeta, ...]
    blocked: str = ""
    ended: bool = False


class PayloadItem(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of one group; fields as in :class:`PutItem`. With ``file`` it lies there, from byte ``offset`` on."""

    ticket: int
    checksum: int
    lengths: tuple[int, ...]
    segment: str = ""
    source: str = ""
    file: str = ""
    offset: int = 0

    @property
    def num_frames(self) -> int:
        """Payload frames of the reply that are this group's."""
        return 0 if self.segment or self.file else len(self.lengths)


class Payloads(msgspec.Struct, frozen=True, kw_only=True, tag="payloads"):
    """Announces the payload frames of leased groups, in the order asked."""

    groups: tuple[PayloadItem, ...]


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag="committed"):
    """The frontier after the commit and the status for the step's metrics; ``status.lag.consumed`` is this step's."""

    frontier: Frontier
    status: QueueStatus


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """Answers :class:`StatusRequest`."""

    status: QueueStatus


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """Nothing to tell but that it was done; a heartbeat hears which of the sender's segments may be written again."""

    released: tuple[str, ...] = ()


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The request was refused; ``kind`` names the error class of :mod:`asyncrl.errors`."""

    kind: str
    message: str


ReplyBody = Welcome | Tickets | Outcomes | Lease | Payloads | Committed | Status | Done | Refused


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Header frame of a request."""

    protocol: Count
    run_id: str
    sender: str
    sequence: Count
    body: RequestBody


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Header frame of a reply to the request with the same sequence number."""

    sequence: int
    body: ReplyBody


# between consumer and producer --------------------------------------------------------------------


class Pull(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer asks a producer for the payload that it keeps under ``segment``."""

    protocol: Count
    run_id: str
    segment: str


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, before the frames; ``found`` is false when nothing of that name is kept."""

    segment: str
    found: bool
