"""The seeded permutation is a bijection with the right inverse for every size and seed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.tasks.order import Permutation


@given(size=st.integers(1, 600), seed=st.integers(0, 2**64))
def test_every_element_is_visited_once_and_found_again(size: int, seed: int) -> None:
    permutation = Permutation(size, "p", seed)
    image = [permutation.forward(index) for index in range(size)]
    assert sorted(image) == list(range(size))
    assert [permutation.backward(element) for element in image] == list(range(size))


@given(size=st.integers(1, 2**40), seed=st.integers(0, 99), data=st.data())
def test_a_huge_permutation_needs_no_table(size: int, seed: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    permutation = Permutation(size, "p", seed)
    assert 0 <= permutation.forward(index) < size
    assert permutation.backward(permutation.forward(index)) == index
