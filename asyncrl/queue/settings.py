"""What the gate is told, and the rules that decide whether such a run can live. Loads without zmq.

Consumes the options, produces :class:`GateSettings`; :func:`check_liveness` is called when a config is read.

Source: design note, section 4; fault B49.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.queue.limiter import Limiter

__all__ = ["GateSettings", "check_liveness", "least_staleness"]


def least_staleness(groups_per_step: int, window: int, publish_every: int, max_uses: int = 1) -> int:
    """The lowest ``max_staleness`` with which the learner always gets its next batch.

    ``k - 1`` versions pass between two publishes; a straggler overtaken ``w - 1`` times is trained up to
    ``ceil((w - 1) / G)`` steps late, a group used U times is trained in U steps, and tickets are issued with that reserve.

    Example:
        >>> least_staleness(groups_per_step=8, window=9, publish_every=2)
        2
    """
    return publish_every - 1 + -(-(window - 1) // groups_per_step) + max_uses - 1


def share_of(groups_per_step: int, shard: int, shards: int) -> int:
    """Slots of a training step that a shard owes.

    Example:
        >>> [share_of(8, shard, 3) for shard in range(3)]
        [3, 3, 2]
    """
    return groups_per_step // shards + (shard < groups_per_step % shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """Numbers and rules of one gate.

    Attributes:
        groups_per_step: G, groups of one training step that this shard owes. shard, shards: its number, and how many there are.
        max_staleness: S, in versions. window: w, in groups.
        publish_every: k, training steps between two publishes.
        lockstep: ticket i is sampled wholly by version ``max(0, i // G - S)``.
        replace_no_signal: a group whose rewards are all equal is dropped, ``no_signal_budget_groups`` times a step.
        ticket_deadline_s, max_attempts: when a ticket is issued again, and how often it may be issued.
        dead_after_s: a producer silent for so long is dead. restart_s: how long one that died may take to come back.
        max_queued_groups, max_queued_bytes: finished groups held before tickets stop.
        drop_last_batch: the last, partial batch of a finite source is dropped. total_tickets: its size, None without end.
        order: how finished groups are chosen; only ``fifo`` keeps the bound by construction, the others by dropping.
        max_uses: U, in how many steps a group is trained. samples_per_insert, error_buffer: of the limiter of the other orders; 0 for the
            uses of a group, and for the smallest that can live.
        seed: of the orders that draw. priority_exponent: of ``prioritised``.

    Raises:
        ConfigError: the settings cannot live, with the numbers.
    """

    groups_per_step: int
    max_staleness: int
    window: int
    publish_every: int
    lockstep: bool
    replace_no_signal: bool
    no_signal_budget_groups: int
    ticket_deadline_s: float
    max_attempts: int
    dead_after_s: float
    restart_s: float
    max_queued_groups: int
    max_queued_bytes: int
    drop_last_batch: bool
    total_tickets: int | None
    shard: int = 0
    shards: int = 1
    order: str = "fifo"
    max_uses: int = 1
    samples_per_insert: float = 0.0
    error_buffer: float = 0.0
    seed: int = 0
    priority_exponent: float = 1.0

    def __post_init__(self) -> None:
        _check_combinations(self)
        if self.lockstep:
            _check_lockstep(self)
        _check_bound(self)
        self.new_limiter()

    def new_limiter(self) -> Limiter | None:
        """The limiter of an order other than ``fifo``, None for that; a buffer of 0 stands for the smallest that can live.

        Raises:
            ConfigError: the settings would deadlock, with the numbers.
        """
        if self.order == "fifo":
            return None
        rate, groups = self.samples_per_insert or float(self.max_uses), self.groups_per_step
        return Limiter(rate, groups, self.error_buffer or (rate + groups) / 2, groups_per_step=groups, max_uses=self.max_uses)

    @classmethod
    def from_config(cls, config: Config, total_tickets: int | None, shard: int = 0) -> GateSettings:
        """The settings that the options ask for; ``total_tickets`` is the size of the prompt source."""
        queue, algorithm = config.queue, config.algorithm
        return cls(
            groups_per_step=share_of(algorithm.groups_per_step, shard, queue.shards),
            max_staleness=queue.max_staleness,
            window=queue.window,
            publish_every=config.sync.every,
            lockstep=queue.schedule == "lockstep",
            replace_no_signal=algorithm.no_signal == "replace",
            no_signal_budget_groups=algorithm.no_signal_budget_groups,
            ticket_deadline_s=queue.ticket_deadline_s,
            max_attempts=queue.max_attempts,
            dead_after_s=queue.dead_after_s,
            restart_s=config.generator.start_timeout_s,
            max_queued_groups=queue.max_queued_groups,
            max_queued_bytes=queue.max_queued_mib << 20,
            drop_last_batch=queue.last_batch == "drop",
            total_tickets=total_tickets,
            shard=shard,
            shards=queue.shards,
            order=queue.order,
            max_uses=queue.max_uses,
            samples_per_insert=queue.samples_per_insert,
            error_buffer=queue.error_buffer,
            seed=config.task.seed,
            priority_exponent=queue.priority_exponent,
        )


def check_liveness(config: Config) -> None:
    """Whether a run with these options always reaches its next step, as far as the queue decides that.

    Raises:
        ConfigError: it cannot, with the rule, the numbers and the fix.

    Example:
        >>> check_liveness(Config())
    """
    shards, groups = config.queue.shards, config.algorithm.groups_per_step
    if shards > groups:
        raise ConfigError(
            f"each of queue.shards owes a slot of every step, so they are at most algorithm.groups_per_step = {groups}; met {shards}"
        )
    for shard in {0, shards - 1}:
        GateSettings.from_config(config, None, shard)
    if config.algorithm.no_signal == "replace" and config.algorithm.group_size < 2:
        raise ConfigError(
            "algorithm.no_signal=replace drops groups whose rewards are all equal, which a group of one always is; "
            f"met algorithm.group_size={config.algorithm.group_size}: set it to 2 or more, or algorithm.no_signal=keep"
        )
    if config.queue.payload == "direct" and config.queue.schedule == "lockstep":
        raise ConfigError(
            "queue.payload=direct needs queue.schedule=async: what dies with its producer is sampled again, and in lockstep nobody may "
            "have its version any more; set queue.payload=shm or inline"
        )
    if config.queue.dead_after_s <= 2 * config.queue.heartbeat_s:
        raise ConfigError(
            f"queue.dead_after_s is more than twice queue.heartbeat_s, or the living are taken for dead; met "
            f"{config.queue.dead_after_s:g} s and {config.queue.heartbeat_s:g} s: raise the first or lower the second"
        )


def _check_bound(settings: GateSettings) -> None:
    groups, window, every = settings.groups_per_step, settings.window, settings.publish_every
    # other orders drop what is too old, used or not
    uses = settings.max_uses if settings.order == "fifo" else 1
    least = least_staleness(groups, window, every, uses)
    if settings.max_staleness < least:
        raise ConfigError(
            f"queue.max_staleness >= sync.every - 1 + ceil((queue.window - 1) / groups a step) + queue.max_uses - 1 = "
            f"{every} - 1 + ceil({window - 1} / {groups}) + {uses} - 1 = {least}; met {settings.max_staleness}: the learner would "
            f"wait for ever. Set queue.max_staleness={least} or more, or publish more often, or narrow the window"
        )


def _check_combinations(settings: GateSettings) -> None:
    rules = (
        (
            "max_uses",
            settings.max_uses,
            settings.max_uses > 1 and settings.window > 1,
            "queue.window=1: an overtaking group would take several slots",
        ),
        (
            "max_uses",
            settings.max_uses,
            settings.max_uses > 1 and settings.lockstep,
            "queue.schedule=async: in lockstep a ticket owns one slot",
        ),
        (
            "order",
            settings.order,
            settings.order != "fifo" and settings.window > 1,
            "queue.window=1: only order=fifo has stragglers to overtake",
        ),
        ("order", settings.order, settings.order != "fifo" and settings.lockstep, "queue.schedule=async: in lockstep batches go by ticket"),
        (
            "samples_per_insert",
            settings.samples_per_insert,
            settings.samples_per_insert > settings.max_uses,
            f"queue.max_uses={math.ceil(settings.samples_per_insert)} or more, since a group pays for no more samples than it has uses",
        ),
        (
            "shards",
            settings.shards,
            settings.shards > 1 and settings.lockstep,
            "queue.schedule=async: in lockstep one broker orders all tickets",
        ),
    )
    for name, met, broken, need in rules:
        if broken:
            raise ConfigError(f"queue.{name}={met} needs {need}")


def _check_lockstep(settings: GateSettings) -> None:
    rules = (
        (settings.window == 1, f"queue.window=1; met {settings.window}"),
        (settings.publish_every == 1, f"sync.every=1, since each version samples its own tickets; met {settings.publish_every}"),
        (not settings.replace_no_signal, "algorithm.no_signal=keep, since a replaced group would move all later ones; met replace"),
    )
    for kept, rule in rules:
        if not kept:
            raise ConfigError(f"queue.schedule=lockstep needs {rule}: change it, or set queue.schedule=async")
