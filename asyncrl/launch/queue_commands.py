"""The sub-commands of ``asyncrl`` that belong to the queue.

asyncrl keys DIR NAME…                   make a CURVE key a name, and allow it
asyncrl queue ls RUN                     one line a group
asyncrl queue show RUN TICKET            everything about one
asyncrl queue verify RUN                 checksums and counts; exit code 1 if something is wrong
asyncrl queue tail RUN                   commits and refusals as they come
asyncrl queue serve DIR [name=value …]   a queue by itself, for trainers of your own

Loads nothing heavy until a command runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["add_commands"]

STATES = ("generating", "reissue", "queued", "leased", "trained", "dropped")


def add_commands(subparsers: Any) -> None:
    """Adds the queue's commands to those of ``asyncrl``."""
    keys = subparsers.add_parser("keys", help="make one CURVE key a name, for a queue that other machines reach")
    keys.add_argument("folder", metavar="DIR", help="folder of key files; made if it is not there")
    keys.add_argument("names", nargs="+", metavar="NAME", help="one for the server and one for each process that may speak with it")
    keys.set_defaults(command=_keys)
    looks = subparsers.add_parser("queue", help="look into the queue of a run, live or dead, or serve one")
    queue = looks.add_subparsers(required=True, metavar="WHAT")
    ls = _inspection(queue, "ls", "one line a group", _ls)
    ls.add_argument("--state", choices=STATES, help="groups in this state; without it all that are neither trained nor dropped")
    ls.add_argument("--limit", type=int, default=1000, metavar="N", help="at most so many groups (1000)")
    show = _inspection(queue, "show", "everything about one ticket", _show)
    show.add_argument("ticket", type=int, metavar="TICKET")
    _inspection(queue, "verify", "check every payload and count every ticket; exit code 1 if something is wrong", _verify)
    tail = _inspection(queue, "tail", "commits and refusals as they come", _tail)
    tail.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks (1)")
    tail.add_argument("--last", type=int, default=10, metavar="N", help="commits shown at first (10)")
    tail.add_argument("--seconds", type=float, default=0.0, metavar="S", help="end after so long; 0: when interrupted (0)")

    serve = queue.add_parser("serve", help="run a queue in the foreground, for trainers of your own")
    serve.add_argument("run", type=Path, metavar="DIR", help="run directory; made if it is not there, and gone on with if it is")
    serve.add_argument("overrides", nargs="*", metavar="name=value")
    serve.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="start again from the frontier in FOLDER/manifest.json")
    serve.set_defaults(command=_serve)


def _inspection(queue: Any, name: str, text: str, command: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = queue.add_parser(name, help=text)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--json", action="store_true", help="JSON instead of text")
    parser.set_defaults(command=command)
    return parser


def _keys(options: argparse.Namespace) -> int:
    from asyncrl.queue.keys import make_keys

    for path in make_keys(Path(options.folder), options.names):
        print(path)
    return 0


def _ls(options: argparse.Namespace) -> int:
    import msgspec

    from asyncrl.queue.inspect import LIVE, group_lines, open_shards

    with open_shards(options.run) as shards:
        lines = group_lines(shards, (options.state,) if options.state else LIVE, options.limit)
        counts = [(name, sum(files.view.counts().get(name, 0) for files in shards)) for name in STATES]
    if options.json:
        print(json.dumps({"groups": msgspec.to_builtins(lines), "counts": dict(counts)}))
        return 0
    _table(
        ("ticket", "state", "attempt", "producer", "versions", "lag", "bytes", "age s", "reason"),
        [(n.ticket, n.state, n.attempt, n.producer, _span(n.versions), n.lag, n.num_bytes, _age(n.age_s), n.reason[:80]) for n in lines],
    )
    print("; ".join(f"{number} {name}" for name, number in counts))
    return 0


def _show(options: argparse.Namespace) -> int:
    from asyncrl.queue.inspect import describe, open_shards

    with open_shards(options.run) as shards:
        known = describe(shards, options.ticket)
    if options.json:
        print(json.dumps(known))
        return 0
    payload = known.pop("payload", None)
    for name, value in known.items():
        if value not in ("", [], None):
            print(f"{name:<12} {json.dumps(value) if isinstance(value, dict | list) else value}")
    if payload is not None:
        if payload["problem"]:
            print(f"payload      {payload['problem']}")
        trajectories = payload["trajectories"]
        _table(tuple(trajectories[0]) if trajectories else (), [tuple(map(str, each.values())) for each in trajectories])
    return 0


def _verify(options: argparse.Namespace) -> int:
    import msgspec

    from asyncrl.queue.inspect import open_shards
    from asyncrl.queue.verify import verify

    with open_shards(options.run) as shards:
        verdict = verify(shards)
    if options.json:
        print(json.dumps({**msgspec.to_builtins(verdict), "sound": verdict.sound}))
        return 0 if verdict.sound else 1
    print(f"{verdict.num_payloads} payloads of {verdict.num_bytes} bytes read, {len(verdict.damage)} damaged")
    dropped = sum(verdict.dropped.values())
    print(f"{verdict.admitted} admitted = {verdict.trained} trained + {dropped} dropped + {verdict.in_flight} in flight")
    for line in (*verdict.damage, *verdict.miscounts):
        print(f"! {line}")
    return 0 if verdict.sound else 1


def _tail(options: argparse.Namespace) -> int:
    import msgspec

    from asyncrl.queue.tail import follow

    until_s = time.monotonic() + options.seconds
    for each in follow(options.run, options.interval, options.last, lambda: options.seconds > 0 and time.monotonic() >= until_s):
        clock = time.strftime("%H:%M:%S", time.localtime(each.time_s))
        line = json.dumps(msgspec.to_builtins(each)) if options.json else f"{clock}  shard {each.shard}  {each.kind:<8}{each.text}"
        print(line, flush=True)
    return 0


def _serve(options: argparse.Namespace) -> int:
    from asyncrl.launch.serve import serve

    return serve(options.run, options.overrides, options.checkpoint)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Aligned columns, two spaces apart; numbers to the right."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        aligned = (cell.rjust(w) if _is_number(cell) else cell.ljust(w) for cell, w in zip(row, widths, strict=True))
        print("  ".join(aligned).rstrip())


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).lstrip("-").isdigit() or text == "-"


def _span(versions: Sequence[int]) -> str:
    return str(versions[0]) if len(versions) == 1 else f"{versions[0]}..{versions[-1]}"


def _age(age_s: float) -> str:
    return "-" if age_s < 0 else f"{age_s:.1f}"
