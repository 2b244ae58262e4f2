"""Malformed messages of the queue, made from good ones. Pure but for its random numbers, which a seed decides.

Consumes good messages (:class:`Good`); produces messages that are broken in one way each (:class:`Mutant`), of every
kind in ``MUTATIONS`` in turn. A mutant may still be good by chance: the receiver decides.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

__all__ = ["MUTATIONS", "Good", "Mutant", "mutants"]

Frames = list[bytes]

_ODD: tuple[Any, ...] = (
    None, True, -1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, float("nan"), float("inf"), -0.0, "", "x" * 300, "\x00", "\U0001f512", b"\xff",
    [], {}, [[]], {"": 0}, [2**64 - 1] * 3, {0: 2**63}, {"type": "put"}, [[0, 0, 0]],
)  # fmt: skip
_HUGE = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01")
_OPENERS = (b"\x91", b"\x81\xa0", b"\xdd\x00\x00\x00\x01", b"\x92\xc0")


@dataclass(frozen=True, slots=True)
class Good:
    """A message that a receiver accepts: who sends it, its header frame, its payload frames."""

    identity: bytes
    frames: tuple[bytes, ...]

    def tree(self) -> dict[str, Any]:
        """The header as plain containers, free to be changed."""
        tree: dict[str, Any] = msgspec.msgpack.decode(self.frames[0])
        return tree


@dataclass(frozen=True, slots=True)
class Mutant:
    """A message broken by ``kind`` of ``MUTATIONS``."""

    kind: str
    identity: bytes
    frames: Frames


def mutants(good: Callable[[], Sequence[Good]], seed: int) -> Iterator[Mutant]:
    """Mutants without end; the same for the same seed and the same good messages.

    ``good`` is asked before each mutant, so that what is broken would have been accepted at that moment.
    """
    rng = random.Random(seed)
    kinds = list(MUTATIONS.items())
    number = 0
    while True:
        kind, mutate = kinds[number % len(kinds)]
        number += 1
        one = rng.choice(good())
        identity = rng.randbytes(rng.randint(1, 40)) if rng.random() < 0.02 else one.identity
        yield Mutant(kind, identity, mutate(rng, one))


def _header(change: Callable[[random.Random, bytearray], Any]) -> Callable[[random.Random, Good], Frames]:
    def mutate(rng: random.Random, good: Good) -> Frames:
        header = bytearray(good.frames[0])
        changed = change(rng, header)
        return [bytes(header if changed is None else changed), *good.frames[1:]]

    return mutate


def _payload(change: Callable[[random.Random, bytearray], Any]) -> Callable[[random.Random, Good], Frames]:
    def mutate(rng: random.Random, good: Good) -> Frames:
        frames = list(good.frames)
        i = rng.randrange(len(frames))
        frame = bytearray(frames[i])
        changed = change(rng, frame)
        frames[i] = bytes(frame if changed is None else changed)
        return frames

    return mutate


def _tree(change: Callable[[random.Random, dict[str, Any]], None]) -> Callable[[random.Random, Good], Frames]:
    def mutate(rng: random.Random, good: Good) -> Frames:
        tree = good.tree()
        change(rng, tree)
        return [msgspec.msgpack.encode(tree), *good.frames[1:]]

    return mutate


def _flip(rng: random.Random, frame: bytearray) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)


def _cut(rng: random.Random, frame: bytearray) -> None:
    del frame[rng.randrange(len(frame)) :]


def _grow(rng: random.Random, frame: bytearray) -> None:
    frame += rng.randbytes(rng.choice((1, 7, 64, 4096)))


def _splice(rng: random.Random, frame: bytearray) -> None:
    at = rng.randrange(len(frame) + 1)
    frame[at:at] = rng.randbytes(rng.randint(1, 9))


def _huge(rng: random.Random, frame: bytearray) -> None:
    at, length = rng.randrange(len(frame)), rng.choice(_HUGE)
    frame[at : at + rng.choice((1, len(length)))] = length


def _nested(rng: random.Random, frame: bytearray) -> bytes:
    depth = rng.choice((10, 1000, 100_000))
    return bytes(frame[: rng.randrange(len(frame))]) + rng.choice(_OPENERS) * depth


def _number(rng: random.Random, frame: bytearray) -> None:
    """A length or an offset within an Arrow stream becomes absurd."""
    size, code = rng.choice(((4, "<i"), (8, "<q")))
    value = rng.choice((-1, 0, 1, 255, 2**31 - 1, -(2**31))) if size == 4 else rng.choice((-1, 0, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)))
    if len(frame) >= size:
        at = rng.randrange(0, len(frame) - size + 1) // size * size
        struct.pack_into(code, frame, at, value)


def _garbage(rng: random.Random, frame: bytearray) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 5, 100)))


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) within a tree."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)


def _retype(rng: random.Random, tree: dict[str, Any]) -> None:
    container, key = rng.choice(list(_places(tree)))
    container[key] = rng.choice(_ODD)


def _without(rng: random.Random, tree: dict[str, Any]) -> None:
    container, key = rng.choice(list(_places(tree)))
    del container[key]


def _with(rng: random.Random, tree: dict[str, Any]) -> None:
    rng.choice((tree, tree["body"]))[rng.choice(("extra", "", "type", "body", "Protocol"))] = rng.choice(_ODD)


def _tag(rng: random.Random, tree: dict[str, Any]) -> None:
    tree["body"]["type"] = rng.choice(("", "pickle", "hello", "put", "commit", "welcome", "fetch", "producer_gone", "lease_request"))


def _set(name: str, *values: Any) -> Callable[[random.Random, Good], Frames]:
    def change(rng: random.Random, tree: dict[str, Any]) -> None:
        tree[name] = rng.choice(values)

    return _tree(change)


def _renumber(rng: random.Random, tree: dict[str, Any]) -> None:
    tree["sequence"] += rng.choice((-1, 1, 2, 1000, 2**40, -tree["sequence"]))


def _rename(rng: random.Random, tree: dict[str, Any]) -> None:
    tree["sender"] = f"stranger-{rng.randrange(10**9)}"


def _replay(rng: random.Random, good: Good) -> Frames:
    return list(good.frames)


def _no_frames(rng: random.Random, good: Good) -> Frames:
    return []


def _fewer(rng: random.Random, good: Good) -> Frames:
    frames = list(good.frames)
    del frames[rng.randrange(len(frames))]
    return frames


def _more(rng: random.Random, good: Good) -> Frames:
    frames = list(good.frames)
    for _ in range(rng.choice((1, 1, 2, 300))):
        frames.insert(rng.randrange(len(frames) + 1), rng.choice((b"", b"\x00", good.frames[-1], rng.randbytes(50))))
    return frames


def _swapped(rng: random.Random, good: Good) -> Frames:
    frames = list(good.frames)
    rng.shuffle(frames)
    return frames


MUTATIONS: dict[str, Callable[[random.Random, Good], Frames]] = {
    "header bits flipped": _header(_flip),
    "header cut": _header(_cut),
    "header grown": _header(_grow),
    "header spliced": _header(_splice),
    "header of huge lengths": _header(_huge),
    "header nested": _header(_nested),
    "header of garbage": _header(_garbage),
    "field of another type": _tree(_retype),
    "field missing": _tree(_without),
    "field added": _tree(_with),
    "body of another kind": _tree(_tag),
    "another run": _set("run_id", "", "another", "run-a\x00", "x" * 10_000),
    "another protocol": _set("protocol", 0, 2, -1, 2**63),
    "another sender": _tree(_rename),
    "sender of odd length": _set("sender", "", "x" * 129, "x" * 100_000, "\x00\n"),
    "another number": _tree(_renumber),
    "replayed": _replay,
    "no frames": _no_frames,
    "frame missing": _fewer,
    "frames added": _more,
    "frames swapped": _swapped,
    "frame bits flipped": _payload(_flip),
    "frame cut": _payload(_cut),
    "frame grown": _payload(_grow),
    "frame of absurd numbers": _payload(_number),
}
