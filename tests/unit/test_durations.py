# SPDX-License-Identifier: Apache-2.0
"""Durations by powers of two, in Python as in C++."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvlink.runtime.durations import BOUNDS_S, Durations

NANOSECONDS = st.lists(st.integers(0, 2**40), max_size=50)


def of(durations: list[int]) -> Durations:
    counted = Durations()
    for ns in durations:
        counted.add(ns)
    return counted


@given(NANOSECONDS)
def test_every_duration_is_in_the_bucket_that_ends_at_or_above_it(durations: list[int]) -> None:
    counted = of(durations)
    for bucket, bound in enumerate([*BOUNDS_S, math.inf]):
        assert sum(counted.buckets[: bucket + 1]) == sum(ns <= round(bound * 1e9, 3) for ns in durations)
    assert (counted.count, counted.sum_ns) == (len(durations), sum(durations))


@given(NANOSECONDS, NANOSECONDS)
def test_what_came_later_is_the_difference(first: list[int], later: list[int]) -> None:
    both = of(first) + of(later)
    assert both.buckets == of(first + later).buckets
    assert both.since(of(first)).buckets == of(later).buckets
    assert both.since(of(first)).sum_ns == sum(later)


@given(st.lists(st.integers(1, 2**34), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_quantile_is_within_its_bucket(durations: list[int], share: float) -> None:
    found_ns = of(durations).quantile_s(share) * 1e9
    true_ns = sorted(durations)[math.ceil(share * len(durations)) - 1]
    assert true_ns / 2.001 <= found_ns or true_ns <= 512
    assert found_ns <= max(2 * true_ns, 512) + 1e-3


def test_without_durations_there_is_no_quantile() -> None:
    assert Durations().quantile_s(0.99) == 0.0
