"""A flood of malformed messages against whatever takes (identity, frames): ``python -m benchmarks.queue_fuzz``.

Consumes mutants of good messages; produces a :class:`Tally`. A refusal is an AsyncRLError; anything else that is raised
is a crash, kept with what repeats it. Memory is measured after a tenth of the messages and at the end.

Source: design note, section 4.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from asyncrl.errors import AsyncRLError
from asyncrl.queue import messages as m
from asyncrl.queue.puts import check_frames, check_meta
from asyncrl.queue.wire import decode_envelope, decode_request
from asyncrl.trajectory import decode_group
from benchmarks.queue_fuzz_broker import BrokerTarget
from benchmarks.queue_fuzz_messages import good_messages
from benchmarks.queue_mutator import Good, Mutant, mutants

__all__ = ["Tally", "Target", "WireTarget", "flood", "main"]

MAX_GROWTH_BYTES = 64 << 20


class Target(Protocol):
    """What is fuzzed."""

    def receive(self, identity: bytes, frames: list[Any]) -> str:
        """Takes one message; the kind of refusal, or an empty text when it was accepted."""

    def good(self) -> Sequence[Good]:
        """Messages that it would accept now."""

    def problems(self) -> list[str]:
        """What does not hold in it, in sentences."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What became of the messages; ``growth_bytes`` is that of resident memory after the first tenth.

    ``crashes``: by what was raised that is no refusal, the first message that did it.
    """

    seed: int
    sent: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    accepted_by_mutation: Counter[str] = field(default_factory=Counter)
    crashed: Counter[str] = field(default_factory=Counter)
    crashes: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    growth_bytes: int = 0
    peak_bytes: int = 0
    slowest_ms: float = 0.0
    slowest: str = ""
    seconds: float = 0.0

    @property
    def problems(self) -> list[str]:
        """What must hold and does not."""
        said = list(self.failures)
        said += [f"{self.crashed[what]} times: {what}: {first}" for what, first in self.crashes.items()]
        if self.sent != self.accepted + self.refused.total() + self.crashed.total():
            said.append(f"{self.sent} sent, but {self.accepted} accepted and {self.refused.total()} refused")
        if self.growth_bytes > MAX_GROWTH_BYTES:
            said.append(f"resident memory grew by {self.growth_bytes >> 20} MiB; at most {MAX_GROWTH_BYTES >> 20} MiB are allowed")
        return said


class WireTarget:
    """The decoders alone: header, body, and the payloads of a put."""

    def __init__(self) -> None:
        self._good = good_messages()

    def good(self) -> Sequence[Good]:
        """See :class:`Target`."""
        return self._good

    def problems(self) -> list[str]:
        """Nothing is counted here."""
        return []

    def receive(self, identity: bytes, frames: list[Any]) -> str:
        """See :class:`Target`."""
        if not frames:
            return "no frames"
        try:
            decode_envelope(frames[0])
            request = decode_request(frames[0])
            if isinstance(request.body, m.Put):
                check_frames(request.body, frames[1:])
                for item in request.body.groups:
                    check_meta(item)
                for frame in frames[1:]:
                    decode_group(frame)
        except AsyncRLError as error:
            return type(error).__name__
        return ""


def flood(target: Target, num_messages: int, seed: int) -> Tally:
    """Sends ``num_messages`` mutants to the target."""
    tally = Tally(seed=seed)
    started_s, settled_bytes = time.monotonic(), 0
    for number, mutant in enumerate(mutants(target.good, seed)):
        if number == num_messages:
            break
        if number == num_messages // 10:
            settled_bytes = _resident_bytes()
        _one(target, mutant, number, tally)
    tally.growth_bytes = max(0, _resident_bytes() - settled_bytes)
    tally.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    tally.seconds = time.monotonic() - started_s
    tally.failures.extend(target.problems())
    return tally


def _one(target: Target, mutant: Mutant, number: int, tally: Tally) -> None:
    tally.sent += 1
    began_s = time.process_time()
    try:
        refusal = target.receive(mutant.identity, list(mutant.frames))
    except Exception as error:  # noqa: BLE001 - any error but a refusal is the finding sought here
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__} in {Path(where.filename).name}:{where.name}"
        tally.crashed[what] += 1
        frames = [frame[:400].hex() for frame in mutant.frames[:2]]
        tally.crashes.setdefault(what, f"seed {tally.seed}, message {number}, {mutant.kind}: {str(error)[:200]}; frames {frames}")
        return
    finally:
        took_ms = (time.process_time() - began_s) * 1000
        if took_ms > tally.slowest_ms:
            tally.slowest_ms, tally.slowest = took_ms, f"message {number}, {mutant.kind}"
    if refusal:
        tally.refused[refusal] += 1
    else:
        tally.accepted += 1
        tally.accepted_by_mutation[mutant.kind] += 1


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one flood and prints its tally as JSON; exit code 1 if something does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queue_fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=["broker", "wire"], default="broker", help="the whole broker, or its decoders and payloads")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    if options.target == "wire":
        tally = flood(WireTarget(), options.messages, options.seed)
    else:
        with tempfile.TemporaryDirectory(prefix="asyncrl-fuzz-") as folder, BrokerTarget(Path(folder)) as target:
            tally = flood(target, options.messages, options.seed)
    print(json.dumps({each.name: getattr(tally, each.name) for each in fields(tally)}, indent=1))
    for problem in tally.problems:
        print(problem, file=sys.stderr)
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
