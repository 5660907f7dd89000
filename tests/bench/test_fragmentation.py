# SPDX-License-Identifier: Apache-2.0
"""Blocks as a paged allocator hands them out after a trace: by hand on small pools, and what every draw keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvlink.benchmarks.harness.block_draws import Order
from kvlink.benchmarks.harness.contents import Ids
from kvlink.benchmarks.workloads.fragmentation import FreeBlocks, Replayed, Server, order_of
from kvlink.benchmarks.workloads.traces import Request
from kvlink.errors import ConfigError

SHORT, LONG = Request(0.0, 20, 30), Request(0.0, 40, 100)  # 2 blocks, then 4; 3, then 9


def asked(order: str, seed: int = 1, trace: str = "", pool: int = 512) -> list[Ids]:
    return order_of(order, 32, trace).draw(np.random.default_rng(seed), pool, 4, 32)


def test_full_blocks_come_back_last_and_the_last_first() -> None:
    free = FreeBlocks(6)
    assert free.take(4) == [0, 1, 2, 3]
    free.give_back([0, 1, 2, 3], full=3)
    assert len(free) == 6
    assert free.take(6) == [3, 4, 5, 2, 1, 0]


def test_requests_take_grow_and_end() -> None:
    server = Server([SHORT, LONG], 64, live=2, first=0)
    server.step()  # both come
    assert server.handed_out == 2 + 3
    server.step()  # 36 and 56 tokens
    assert server.handed_out == 2 + 3 + 1 + 1
    assert server.take(1) == [7]
    server.step()  # 50 tokens, the end of the short one: blocks 0, 1, 5 are full, 8 is not; another comes
    server.step()
    assert len(server.free) == 64 - server.handed_out + 4


@pytest.mark.parametrize("live", [1, 3])
def test_no_more_live_at_a_time_than_asked_for_and_in_half_of_the_pool(live: int) -> None:
    server = Server([LONG], 60, live, first=0)
    most = 0
    for _ in range(100):
        server.step()
        most = max(most, 60 - len(server.free))
    assert most <= min(live * 9, 30)
    assert most > 9 * (live - 1)


def test_whoever_came_last_makes_room() -> None:
    server = Server([LONG], 60, 3, first=0)
    for _ in range(5):
        server.step()
    server.leave(60 - 9)
    assert len(server.free) >= 60 - 9
    server.leave(60)
    assert sorted(server.take(60)) == list(range(60))


@pytest.mark.parametrize("order", ["allocator", "allocator:1", "allocator:64:1", "allocator:4:20"])
@pytest.mark.parametrize("pool", [128, 129, 512])
def test_lists_have_no_block_twice(order: str, pool: int) -> None:
    drawn = np.concatenate(asked(order, pool=pool))
    assert len(np.unique(drawn)) == 4 * 32
    assert drawn.max() < pool


def test_the_same_seed_gives_the_same_blocks() -> None:
    assert np.array_equal(asked("allocator"), asked("allocator"))
    assert not np.array_equal(asked("allocator"), asked("allocator", seed=2))
    assert not np.array_equal(asked("allocator"), asked("allocator:2"))


def test_draws_go_on_with_the_replay() -> None:
    order, rng = order_of("allocator", 32), np.random.default_rng(1)
    first, second = (order.draw(rng, 512, 1, 32)[0] for _ in range(2))
    assert not np.array_equal(first, second)


def test_a_cache_falls_to_pieces_the_longer_it_serves() -> None:
    pieces = [
        np.mean([np.count_nonzero(np.abs(np.diff(ids.astype(int))) != 1) for ids in asked(order, pool=8192)])
        for order in ("allocator:16:1", "allocator:16:50")
    ]
    assert 0 < pieces[0] < 16 < pieces[1] < 32


def test_a_trace_of_a_file_is_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 100, "output_length": 1}\n')
    assert not np.array_equal(asked("allocator", trace=str(trace)), asked("allocator"))
    trace.write_text('{"timestamp": 0, "input_length": 100000, "output_length": 1}\n')
    with pytest.raises(ConfigError, match="half of a pool of 512 blocks"):
        asked("allocator", trace=str(trace))


def test_other_orders_are_read_as_before() -> None:
    assert order_of("random", 32) == Order(1)
    assert order_of("runs:8", 32) == Order(8)
    assert isinstance(order_of("allocator", 32), Replayed)


@pytest.mark.parametrize(
    "text", ["allocator:", "allocator:0", "allocator:x", "allocator:1:2:3", "allocator:1000", "allocator:²"]
)
def test_what_is_no_allocator_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="with numbers of 1 to 999"):
        order_of(text, 32)
