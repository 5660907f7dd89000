# SPDX-License-Identifier: Apache-2.0
"""Values are known by who they are, not by what they equal, and only the last ones are."""

from __future__ import annotations

import pytest

from kvlink.control.codec._remembered import Remembered


def make_remembered(most: int) -> tuple[Remembered[list[int], int], list[list[int]]]:
    made: list[list[int]] = []

    def total(value: list[int]) -> int:
        made.append(value)
        return sum(value)

    return Remembered(total, most), made


def test_each_value_is_made_once() -> None:
    remembered, made = make_remembered(8)
    one, equal = [1, 2], [1, 2]
    assert [remembered(one), remembered(equal), remembered(one), remembered(equal)] == [3, 3, 3, 3]
    assert made[0] is one
    assert made[1] is equal
    assert len(made) == 2


def test_the_oldest_is_forgotten() -> None:
    remembered, made = make_remembered(2)
    values = [[1], [2], [3]]
    assert [remembered(value) for value in values] == [1, 2, 3]
    assert remembered(values[2]) == 3
    assert len(made) == 3
    assert remembered(values[0]) == 1
    assert len(made) == 4


def test_values_that_are_gone_do_not_come_back_as_others() -> None:
    remembered, _ = make_remembered(4)
    assert [remembered([number]) for number in range(1_000)] == list(range(1_000))


def test_what_fails_is_tried_again() -> None:
    remembered = Remembered(lambda value: 1 // value[0], 2)
    zero = [0]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            remembered(zero)
