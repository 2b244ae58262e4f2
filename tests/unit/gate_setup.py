"""A gate, and groups by hand, for the unit tests of the gate."""

from __future__ import annotations

from typing import Any

from asyncrl.config import Config
from asyncrl.queue.gate import Gate
from asyncrl.queue.messages import Frontier
from asyncrl.queue.records import Issue, LeaseGranted
from asyncrl.queue.settings import GateSettings
from asyncrl.trajectory import GroupMeta

A, B = "generator-0", "generator-1"


def options(
    groups: int, staleness: int, window: int = 1, every: int = 1, no_signal: str = "replace", budget: int = 64, **queue: Any
) -> Config:
    algorithm = {"groups_per_step": groups, "no_signal": no_signal, "no_signal_budget_groups": budget}
    queue = {"max_staleness": staleness, "window": window, **queue}
    return Config.model_validate({"algorithm": algorithm, "queue": queue, "sync": {"every": every}})


def new_gate(groups: int, staleness: int, total: int | None = None, frontier: Frontier | None = None, **more: Any) -> Gate:
    gate = Gate(GateSettings.from_config(options(groups, staleness, **more), total), frontier)
    for name in (A, B):
        gate.hello(name, 0.0)
    return gate


def meta_of(issue: Issue, version: int, rewards: tuple[float, ...] = (0.0, 1.0), tokens: int = 6, producer: str = A) -> GroupMeta:
    return GroupMeta(
        group_id=f"g{issue.ticket}",
        ticket=issue.ticket,
        attempt=issue.attempt,
        incarnation=0,
        generator=producer,
        lengths_N=(5, 5),
        prompt_lengths_N=(2, 2),
        sampled_tokens_N=(3, 3),
        rewards_N=rewards,
        tokens_by_version={version: tokens},
        payload_bytes=100,
    )


def ask(gate: Gate, version: int, producer: str = A, now_s: float = 0.0) -> Issue:
    issue = gate.issue(producer, version, now_s)
    assert isinstance(issue, Issue), issue
    return issue


def ask_all(gate: Gate, version: int, producer: str = A) -> list[Issue]:
    issues = []
    while isinstance(issue := gate.issue(producer, version, 0.0), Issue):
        issues.append(issue)
    return issues


def finish(gate: Gate, *issues: Issue, version: int = 0, rewards: tuple[float, ...] = (0.0, 1.0)) -> list[str]:
    return [gate.finish(A, meta_of(issue, version, rewards), 0.0) for issue in issues]


def leased(gate: Gate, step: int) -> list[int]:
    answer = gate.lease(step, 0, 0.0)
    return [meta.ticket for meta in answer.groups_G] if isinstance(answer, LeaseGranted) else []


def conserved(gate: Gate) -> bool:
    status = gate.status()
    return status.admitted == status.trained + sum(status.dropped.values()) + status.in_flight
