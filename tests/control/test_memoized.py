# SPDX-License-Identifier: Apache-2.0
"""Values are known by who they are, not by what they equal, and only the last ones are."""

from __future__ import annotations

import pytest

from kvlink.control.codec._wire import Memoized


def make_memoized(most: int) -> tuple[Memoized[list[int], int], list[list[int]]]:
    made: list[list[int]] = []

    def total(value: list[int]) -> int:
        made.append(value)
        return sum(value)

    return Memoized(total, most), made


def test_each_value_is_made_once() -> None:
    memoized, made = make_memoized(8)
    one, equal = [1, 2], [1, 2]
    assert [memoized(one), memoized(equal), memoized(one), memoized(equal)] == [3, 3, 3, 3]
    assert made[0] is one
    assert made[1] is equal
    assert len(made) == 2


def test_the_oldest_is_forgotten() -> None:
    memoized, made = make_memoized(2)
    values = [[1], [2], [3]]
    assert [memoized(value) for value in values] == [1, 2, 3]
    assert memoized(values[2]) == 3
    assert len(made) == 3
    assert memoized(values[0]) == 1
    assert len(made) == 4


def test_values_that_are_gone_do_not_come_back_as_others() -> None:
    memoized, _ = make_memoized(4)
    assert [memoized([number]) for number in range(1_000)] == list(range(1_000))


def test_what_fails_is_tried_again() -> None:
    memoized = Memoized(lambda value: 1 // value[0], 2)
    zero = [0]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            memoized(zero)
