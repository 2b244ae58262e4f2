"""Weights on the number line: set one, and find the leaf under a point of their cumulated sum, each in O(log of the largest leaf).

Consumes leaf numbers and whole weights, produces leaves. Node ``i`` of level ``l`` holds the sum of leaves ``i 2^l`` to
``(i + 1) 2^l - 1``; nodes of sum 0 are not stored, so memory follows the leaves that are there, not the highest number.
Weights are whole numbers: sums are exact, so what is found depends on the weights alone and not on the order in which they were set.

Source: design note, section 4.
"""

from __future__ import annotations

from asyncrl.errors import DataError

__all__ = ["SumTree"]


class SumTree:
    """A sparse sum tree over leaves 0, 1, 2, …

    Example:
        >>> tree = SumTree()
        >>> tree.set(7, 5); tree.set(2, 3)
        >>> tree.total, [tree.find(point) for point in (0, 2, 3, 7)]
        (8, [2, 2, 7, 7])
    """

    def __init__(self) -> None:
        self._levels: list[dict[int, int]] = [{}]

    def __len__(self) -> int:
        return len(self._levels[0])

    @property
    def total(self) -> int:
        """Sum of all weights."""
        return self._levels[-1].get(0, 0)

    @property
    def num_nodes(self) -> int:
        """Sums stored, those of single leaves included."""
        return sum(map(len, self._levels))

    def get(self, leaf: int) -> int:
        """Weight of a leaf, 0 if none was set."""
        return self._levels[0].get(leaf, 0)

    def set(self, leaf: int, weight: int) -> None:
        """Sets the weight of a leaf; 0 removes it.

        Raises:
            DataError: a negative leaf or weight.
        """
        if leaf < 0 or weight < 0:
            raise DataError(f"leaf and weight are whole numbers from 0; met leaf {leaf} with weight {weight}")
        while leaf >> (len(self._levels) - 1):
            self._levels.append(dict(self._levels[-1]) if self.total else {})
        change = weight - self.get(leaf)
        if not change:
            return
        for level in self._levels:
            value = level.get(leaf, 0) + change
            if value:
                level[leaf] = value
            else:
                del level[leaf]
            leaf >>= 1

    def find(self, point: int) -> int:
        """The lowest leaf such that the weights up to and with it sum to more than ``point``.

        Raises:
            DataError: ``point`` is negative or not below ``total``.
        """
        if not 0 <= point < self.total:
            raise DataError(f"a point lies from 0 and below {self.total}; met {point}")
        node = 0
        for level in reversed(self._levels[:-1]):
            node <<= 1
            left = level.get(node, 0)
            if point >= left:
                point -= left
                node += 1
        return node
