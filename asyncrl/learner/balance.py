"""Items of known cost into a given number of parts, so that the heaviest part is as light as cheap methods find.

Largest differencing (each step merges the two partial divisions that are furthest from even, the heavy parts of one onto the light
parts of the other) and the greedy division (most expensive first, to the lightest part) are both improved by moving and swapping
single items out of the heaviest part; the better one is taken. Parts may hold different numbers of items, or none.

Source: Karmarkar and Karp, The Differencing Method of Set Partitioning, UCB/CSD 82/113 (1982); for more than two parts: Michiels,
Korst, Aarts and van Leeuwen, Performance Ratios for the Differencing Method Applied to the Balanced Number Partitioning Problem (2003).
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["partition"]

# costs become whole numbers of up to this many bits: their sums are exact, so that no rounding decides between two divisions
UNIT_BITS = 40

_Parts = list[list[int]]


def partition(costs: Mapping[int, float], num_parts: int) -> tuple[tuple[int, ...], ...]:
    """Keys of ``costs`` in ``num_parts`` parts, each ascending, the part with the most expensive item first.

    The same costs always give the same parts, in whatever order they come; ties go by key. The heaviest part is never heavier than
    that of the greedy division, and no move or swap of single items makes it lighter. Costs are finite and not negative.

    Example:
        >>> partition({0: 8.0, 1: 7.0, 2: 6.0, 3: 5.0, 4: 4.0}, 2)  # the greedy division ends at 17 and 13
        ((0, 1), (2, 3, 4))
    """
    # by a power of two, which loses no bit: whole costs below 2**UNIT_BITS stay exact, and equal loads equal
    shift = UNIT_BITS - math.frexp(max(costs.values(), default=0.0))[1]
    units = {key: round(math.ldexp(costs[key], shift)) for key in sorted(costs)}
    divisions = [_improved(parts, units) for parts in (_differenced(units, num_parts), _greedy(units, num_parts))]
    best = min(divisions, key=lambda parts: max(_load(part, units) for part in parts))
    first = {key: place for place, key in enumerate(_by_cost(units))}
    return tuple(tuple(sorted(part)) for part in sorted(best, key=lambda part: min((first[key] for key in part), default=len(first))))


def _load(part: list[int], units: Mapping[int, int]) -> int:
    return sum(units[key] for key in part)


def _by_cost(units: Mapping[int, int]) -> list[int]:
    return sorted(units, key=lambda key: (-units[key], key))


def _greedy(units: Mapping[int, int], num_parts: int) -> _Parts:
    parts: _Parts = [[] for _ in range(num_parts)]
    lightest = [(0, place) for place in range(num_parts)]
    for key in _by_cost(units):
        load, place = lightest[0]
        parts[place].append(key)
        heapq.heapreplace(lightest, (load + units[key], place))
    return parts


def _differenced(units: Mapping[int, int], num_parts: int) -> _Parts:
    """Partial divisions are lists of (load, keys), heaviest first; the heap holds the most uneven one first, ties by first key."""
    nothing = [(0, list[int]()) for _ in range(num_parts - 1)]
    heap = [(-load if num_parts > 1 else 0, key, [(load, [key]), *nothing]) for key, load in units.items()]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, heavy = heapq.heappop(heap)
        _, second, other = heapq.heappop(heap)
        merged = [(a + b, some + more) for (a, some), (b, more) in zip(heavy, reversed(other), strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], min(first, second), merged))
    return [keys for _, keys in heap[0][2]] if heap else [[] for _ in range(num_parts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """``leaves`` goes from a heaviest part, ``heavy``, to part ``to``, and ``comes`` (None: nothing) the other way."""

    load: int
    heavy: int
    leaves: int
    to: int
    comes: int | None


def _improved(parts: _Parts, units: Mapping[int, int]) -> _Parts:
    """Ends, because each step makes the list of loads, heaviest first, smaller in lexicographic order."""
    parts = [list(part) for part in parts]
    loads = [_load(part, units) for part in parts]
    while True:
        # of parts that are equally heavy the first may have no step where another has one
        heaviest = [place for place, load in enumerate(loads) if load == max(loads)]
        step = next(filter(None, (_best_step(parts, loads, units, heavy) for heavy in heaviest)), None)
        if step is None:
            return parts
        parts[step.heavy].remove(step.leaves)
        parts[step.to].append(step.leaves)
        if step.comes is not None:
            parts[step.to].remove(step.comes)
            parts[step.heavy].append(step.comes)
        loads[step.heavy], loads[step.to] = _load(parts[step.heavy], units), _load(parts[step.to], units)


def _best_step(parts: _Parts, loads: list[int], units: Mapping[int, int], heavy: int) -> _Step | None:
    """The step after which the heavier of its two parts is lightest; None where no step makes the heavy part lighter."""
    best: _Step | None = None
    for place, part in enumerate(parts):
        gap = loads[heavy] - loads[place]
        if gap == 0:
            continue
        offers: list[tuple[int, int | None]] = [(0, None), *((units[key], key) for key in sorted(part, key=lambda k: (units[k], k)))]
        sizes = [size for size, _ in offers]
        for key in sorted(parts[heavy]):
            # half the gap should go over: the nearest offers below and above leave closest to that
            at = bisect.bisect_left(sizes, units[key] - gap // 2)
            for size, other in offers[max(at - 1, 0) : at + 1]:
                moved = units[key] - size
                load = max(loads[heavy] - moved, loads[place] + moved)
                if 0 < moved < gap and (best is None or load < best.load):
                    best = _Step(load=load, heavy=heavy, leaves=key, to=place, comes=other)
    return best
