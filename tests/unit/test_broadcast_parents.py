# SPDX-License-Identifier: Apache-2.0
"""The readers of a broadcast have the right sources, and the model of equal links says how long it takes."""

from __future__ import annotations

import pytest

from kvlink.errors import ConfigError
from kvlink.worker.broadcast import broadcast_parents, depth, readers_of, steps


def links_to(parents: list[int], reader: int) -> int:
    return 0 if reader < 0 else 1 + links_to(parents, parents[reader])


def arrivals(parents: list[int], num_batches: int) -> int:
    """Simulates it: each worker sends one batch in each step, in order, to one reader after the other."""
    readers = range(len(parents))
    has = {-1: num_batches, **dict.fromkeys(readers, 0)}
    turn = dict.fromkeys(has, 0)
    for step in range(1, 10_000):
        sent = []
        for worker in has:
            children = readers_of(parents, worker)
            if not children:
                continue
            batch, which = divmod(turn[worker], len(children))
            if batch < min(has[worker], num_batches):
                turn[worker] += 1
                sent.append(children[which])
        for child in sent:
            has[child] += 1
        if all(has[reader] == num_batches for reader in readers):
            return step
    raise AssertionError("it never ends")


@pytest.mark.parametrize("fanout", [1, 2, 3, 8])
@pytest.mark.parametrize("num_readers", [1, 2, 7, 8, 20])
def test_each_worker_has_so_many_readers_and_none_is_farther_than_needed(
    num_readers: int, fanout: int
) -> None:
    parents = broadcast_parents(num_readers, fanout=fanout)
    assert len(parents) == num_readers
    assert all(parent < reader for reader, parent in enumerate(parents)), "sources come first"
    assert max(len(readers_of(parents, reader)) for reader in range(-1, num_readers)) <= fanout
    assert max(links_to(parents, reader) for reader in range(num_readers)) == depth(num_readers, fanout)


@pytest.mark.parametrize("fanout", [1, 2, 3])
@pytest.mark.parametrize("num_batches", [1, 2, 16])
def test_the_model_bounds_what_links_of_one_rate_do(fanout: int, num_batches: int) -> None:
    for num_readers in (1, 3, 8, 14):
        took = arrivals(broadcast_parents(num_readers, fanout=fanout), num_batches)
        assert took <= steps(num_readers, num_batches, fanout)
    assert arrivals(broadcast_parents(8, fanout=1), num_batches) == num_batches + 7


def test_many_batches_go_along_a_chain_and_few_through_a_tree() -> None:
    assert broadcast_parents(8) == [-1, 0, 1, 2, 3, 4, 5, 6]
    assert broadcast_parents(8, num_batches=1) == [-1, -1, 0, 0, 1, 1, 2, 2]
    assert broadcast_parents(1, num_batches=1) == [-1]


@pytest.mark.parametrize(("readers", "batches", "fanout"), [(0, 1, None), (1, 0, None), (1, 1, 0)])
def test_what_is_no_broadcast_is_refused(readers: int, batches: int, fanout: int | None) -> None:
    with pytest.raises(ConfigError, match="at least one reader"):
        broadcast_parents(readers, batches, fanout)
