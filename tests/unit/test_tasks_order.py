"""Order of prompts: a bijection per epoch, the same for ever, and a derangement of answers."""

from __future__ import annotations

import pytest

from asyncrl.config import TaskConfig
from asyncrl.errors import ConfigError, DataError
from asyncrl.tasks.order import OrderedSource, Permutation, keyed_hash
from asyncrl.tasks.prompt import BadRow, Prompt


class Numbers:
    """Prompts p0, p1, … with answers a0, a1, …"""

    def __init__(self, count: int) -> None:
        self.count = count
        self.bad_rows: tuple[BadRow, ...] = ()

    def row(self, number: int) -> Prompt:
        return Prompt(prompt_id=f"p{number}", prompt=f"p{number}", answer=f"a{number}", extra=f'{{"n": {number}}}')


def ids(source: OrderedSource, indices: range) -> list[str]:
    return [source.prompt(index).prompt_id for index in indices]


def test_a_seed_gives_the_order_that_earlier_versions_gave() -> None:
    assert keyed_hash("order", 0, 0) == 16325307189013275374
    assert [Permutation(10, "order", 0, 0).forward(i) for i in range(10)] == [2, 0, 5, 3, 9, 6, 4, 1, 7, 8]


def test_two_epochs_hold_every_prompt_twice_in_different_orders() -> None:
    source = OrderedSource(Numbers(50), TaskConfig(epochs=2))
    assert source.size == 100
    first, second = ids(source, range(50)), ids(source, range(50, 100))
    assert sorted(first) == sorted(second) == sorted(f"p{n}" for n in range(50))
    assert first != second


def test_an_index_gives_the_same_prompt_whatever_was_asked_before() -> None:
    task = TaskConfig(seed=7)
    straight = ids(OrderedSource(Numbers(13), task), range(40))
    resumed = OrderedSource(Numbers(13), task)
    assert [resumed.prompt(index).prompt_id for index in reversed(range(40))] == straight[::-1]


def test_another_seed_gives_another_order() -> None:
    assert ids(OrderedSource(Numbers(50), TaskConfig(seed=1)), range(50)) != ids(OrderedSource(Numbers(50), TaskConfig(seed=2)), range(50))


def test_without_shuffle_the_order_is_that_of_the_source() -> None:
    assert ids(OrderedSource(Numbers(3), TaskConfig(shuffle=False)), range(5)) == ["p0", "p1", "p2", "p0", "p1"]


def test_size_keeps_the_first_prompts_of_the_source() -> None:
    source = OrderedSource(Numbers(9), TaskConfig(size=4, epochs=1))
    assert source.size == 4 and sorted(ids(source, range(4))) == ["p0", "p1", "p2", "p3"]


def test_more_prompts_than_there_are_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"met 10, the source has 9"):
        OrderedSource(Numbers(9), TaskConfig(size=10))


def test_an_endless_source_has_no_size() -> None:
    source = OrderedSource(Numbers(3), TaskConfig())
    assert source.size is None and source.prompt(3_000_000).prompt_id in {"p0", "p1", "p2"}


@pytest.mark.parametrize("index", [-1, 6])
def test_an_index_outside_the_epochs_is_refused(index: int) -> None:
    with pytest.raises(DataError, match=f"below 6; met {index}"):
        OrderedSource(Numbers(3), TaskConfig(epochs=2)).prompt(index)


@pytest.mark.parametrize("count", [2, 3, 10, 257])
def test_permuted_answers_give_each_prompt_one_other_prompts_answer(count: int) -> None:
    source = OrderedSource(Numbers(count), TaskConfig(permute_answers=True, epochs=1))
    prompts = [source.prompt(index) for index in range(count)]
    assert all(p.prompt_id[1:] != p.answer[1:] for p in prompts)
    assert sorted(p.answer for p in prompts) == sorted(f"a{n}" for n in range(count))
    assert all(p.extra == f'{{"n": {p.answer[1:]}}}' for p in prompts), "what the reward reads follows the answer"


def test_permuted_answers_stay_the_same_in_the_next_epoch() -> None:
    source = OrderedSource(Numbers(20), TaskConfig(permute_answers=True, epochs=2))
    first = {p.prompt_id: p.answer for p in map(source.prompt, range(20))}
    assert {p.prompt_id: p.answer for p in map(source.prompt, range(20, 40))} == first


def test_one_prompt_alone_cannot_be_permuted() -> None:
    with pytest.raises(ConfigError, match="two prompts or more; met 1"):
        OrderedSource(Numbers(1), TaskConfig(permute_answers=True))
