# SPDX-License-Identifier: Apache-2.0
"""Pulls requests of hybrid models: attention and states in the same pages, between ranks of any degree."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from transports.mixed_pools import MixedSpec, whole, whole_model, write
from waiting import eventually

from kvlink import LeaseEnd, ReadyUnit, Ticket, Worker, WorkerConfig
from kvlink.errors import ConfigError, LayoutMismatch, TransferTimeout
from kvlink.layout import dense, num_seats
from kvlink.layout.geometry import Geometry, Order
from kvlink.transfer.group_ids import TokenRanges
from kvlink.transfer.pool import BlockPool

_TOKENS = 11
_DEGREES = (1, 2, 4)


@pytest.fixture
def workers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _worker(stack: ExitStack, pool: BlockPool, name: str, transport: str = "loopback") -> Worker:
    config = WorkerConfig(transports=transport, lease_slots=16, port=0)
    return stack.enter_context(Worker(pool, name, config=config))


def _ids(spec: MixedSpec, seed: int) -> list[list[int]]:
    """Blocks of a request: different pages for attention, and one page for both states."""
    pages = random.Random(seed).sample(range(spec.num_pages), -(-_TOKENS // spec.block_tokens) + 1)
    return [pages[1:], pages[:1], pages[:1]]


def _poison(pool: BlockPool, seed: int) -> list[np.ndarray]:
    for region in range(len(pool.regions)):
        view = pool.numpy(region)
        view[:] = np.random.default_rng([seed, region]).integers(0, 256, view.size, np.uint8)
    return [pool.numpy(region).copy() for region in range(len(pool.regions))]


def _fill(pool: BlockPool, ids: list[list[int]], model: list[np.ndarray]) -> None:
    views = [pool.numpy(region) for region in range(len(pool.regions))]
    write(views, pool.groups, ids, model, whole(pool.groups, _TOKENS))


def _is(pool: BlockPool, wanted: list[np.ndarray]) -> bool:
    return all(np.array_equal(pool.numpy(region), each) for region, each in enumerate(wanted))


@pytest.mark.parametrize("heads", [(2, 8, 4), (1, 4, 8)], ids=["replicas", "mla"])
@pytest.mark.parametrize(("owner_tp", "reader_tp"), [*itertools.product(_DEGREES, _DEGREES)])
def test_every_degree_reads_every_group(
    workers: ExitStack, owner_tp: int, reader_tp: int, heads: tuple[int, int, int]
) -> None:
    model = whole_model(MixedSpec(total_heads=heads), _TOKENS, owner_tp)
    owner_specs = [MixedSpec(total_heads=heads, tp_rank=rank, tp_size=owner_tp) for rank in range(owner_tp)]
    owners = [_worker(workers, spec.make(), f"p{rank}") for rank, spec in enumerate(owner_specs)]
    theirs = _ids(owner_specs[0], 1)
    offered = []
    for owner in owners:
        _fill(owner.pool, theirs, model)
        if seats := num_seats(owner.pool.groups, reader_tp):
            offered.append(owner.offer("r", theirs, num_tokens=_TOKENS, readers=seats))
    for rank in range(reader_tp):
        spec = MixedSpec(block_tokens=8, total_heads=heads, tp_rank=rank, tp_size=reader_tp)
        reader = _worker(workers, spec.make(), f"d{rank}")
        ours = _ids(spec, 2 + rank)
        before = _poison(reader.pool, rank)
        reader.pull(offered, ours).wait(20)
        write(before, reader.pool.groups, ours, model, whole(reader.pool.groups, _TOKENS))
        assert _is(reader.pool, before)
    for owner in owners:
        if num_seats(owner.pool.groups, reader_tp):
            assert next(owner.watch_events_blocking(20)).how is LeaseEnd.SETTLED


def _pair(workers: ExitStack) -> tuple[Worker, Worker]:
    return _worker(workers, MixedSpec().make(), "p"), _worker(workers, MixedSpec().make(), "d")


def _offered(owner: Worker, **how: object) -> tuple[Ticket, list[np.ndarray]]:
    model = whole_model(MixedSpec(), _TOKENS, 5)
    theirs = _ids(MixedSpec(), 7)
    _fill(owner.pool, theirs, model)
    ticket = owner.offer("r", theirs, num_tokens=_TOKENS, **how)  # type: ignore[arg-type]
    return Ticket.from_text(ticket.to_text()), model


@pytest.mark.parametrize(
    ("tokens", "ranges"),
    [
        ((3, 9), [(3, 9), (0, 1), (0, 1)]),
        ([(8, 11), (0, 0), (0, 1)], [(8, 11), (0, 0), (0, 1)]),
        ([(11, 11), (0, 1), (0, 1)], [(11, 11), (0, 1), (0, 1)]),
    ],
    ids=["one range leaves the states", "a range for each group", "states alone"],
)
def test_token_ranges(workers: ExitStack, tokens: object, ranges: list[tuple[int, int]]) -> None:
    owner, reader = _pair(workers)
    ticket, model = _offered(owner)
    ours = _ids(MixedSpec(), 8)
    wanted = _poison(reader.pool, 1)
    write(wanted, reader.pool.groups, ours, model, ranges)
    reader.pull(ticket, ours, tokens=tokens).wait(20)  # type: ignore[arg-type]
    assert _is(reader.pool, wanted)


def test_a_group_may_keep_fewer_tokens_than_others(workers: ExitStack) -> None:
    """As layers with sliding windows do, of which decode reads what they keep."""
    geometries = Geometry(2, 2, 24, 24, block_tokens=4), Geometry(1, 2, 24, 48, block_tokens=4)
    layouts = [dense(geometry, Order.CROSS_LAYER_NHD) for geometry in geometries]
    owner, reader = (
        _worker(workers, BlockPool.allocate(layouts, huge_pages=False), name) for name in ("p", "d")
    )
    view = owner.pool.numpy()
    view[:] = np.random.default_rng(1).integers(0, 256, view.size, np.uint8)
    ticket = Ticket.from_text(owner.offer("r", [[3, 5, 4], [20, 30]], num_tokens=[11, 6]).to_text())
    assert (ticket.num_tokens, ticket.group_sizes, ticket.group_tokens) == (11, (3, 2), (11, 6))
    wanted = reader.pool.numpy().copy()
    blocks = {layout: view[: 48 * layout.block_bytes].reshape(-1, layout.block_bytes) for layout in layouts}
    for layout, pairs in zip(layouts, ([(3, 1), (5, 2), (4, 3)], [(20, 40), (30, 41)]), strict=True):
        for theirs, ours in pairs:
            wanted[ours * layout.block_bytes : (ours + 1) * layout.block_bytes] = blocks[layout][theirs]
    reader.pull(ticket, [[1, 2, 3], [40, 41]], tokens=[(0, 11), (0, 6)]).wait(20)
    for layout, last in zip(layouts, (3, 41), strict=True):  # the last block's last rows are not read
        rows = wanted[last * layout.block_bytes : (last + 1) * layout.block_bytes]
        kept = 11 - 8 if last == 3 else 6 - 4
        for plane in range(len(layout.planes)):
            rows[plane * 192 + kept * 48 : (plane + 1) * 192] = 0
    assert np.array_equal(reader.pool.numpy(), wanted)
    with pytest.raises(ConfigError, match="cache group 1: 11 tokens do not fit 2 blocks of 4"):
        owner.offer("s", [[3, 5, 4], [20, 30]], num_tokens=11)
    with pytest.raises(ConfigError, match="num_tokens has 1 numbers, and the pool 2 cache groups"):
        owner.offer("s", [[3, 5, 4], [20, 30]], num_tokens=[11])


@pytest.fixture
def windowed(workers: ExitStack) -> tuple[Worker, Worker]:
    """Workers of two groups with one row of 8 bytes for each token, in blocks of four, which lie upon each other."""
    layouts = [dense(Geometry(1, 1, 8, 24, block_tokens=4, planes_per_layer=1), Order.NHD)] * 2
    owner, reader = (
        _worker(workers, BlockPool.allocate(layouts, huge_pages=False), name) for name in ("p", "d")
    )
    owner.pool.numpy()[:] = np.repeat(np.arange(1, len(owner.pool.numpy()) // 8 + 1), 8)
    reader.pool.numpy()[:] = 0
    return owner, reader


def _rows(worker: Worker, blocks: Sequence[int]) -> list[int]:
    rows = worker.pool.numpy().reshape(24, 4, 8)[list(blocks), :, 0]
    return [int(row) for row in rows.flat]


@pytest.mark.parametrize("tokens", [None, (0, 11), (5, 11), [(0, 11), (0, 6)]])
def test_a_stream_reads_a_group_with_fewer_tokens_at_the_end(
    windowed: tuple[Worker, Worker], tokens: TokenRanges | None
) -> None:
    """Its rows hold the last tokens, so they are not written when as many tokens of the request are."""
    owner, reader = windowed
    ticket = owner.offer("r", [[3, 5, 4], [20, 21]], num_tokens=[11, 6], ready=0, ready_unit=ReadyUnit.TOKENS)
    pull = reader.pull(ticket, [[1, 2, 3], [8, 9]], tokens=tokens)
    owner.set_ready("r", 10)
    arrived = _rows(owner, [3, 5, 4])[:8]
    first = 5 if tokens == (5, 11) else 0
    eventually(lambda: _rows(reader, [1, 2, 3])[first:8] == arrived[first:])
    assert _rows(reader, [8, 9]) == [0] * 8
    owner.set_ready("r", 11)
    pull.wait(20)
    assert _rows(reader, [8, 9]) == [*_rows(owner, [20, 21])[:6], 0, 0]


@pytest.mark.parametrize("tokens", [None, (0, 11), (3, 11)])
def test_rows_that_were_not_offered_are_not_read(
    windowed: tuple[Worker, Worker], tokens: TokenRanges | None
) -> None:
    owner, reader = windowed
    ticket = owner.offer("r", [[3, 5, 4], [20, 21, 22]], num_tokens=[11, 9])
    reader.pull(ticket, [[1, 2, 3], [8, 9, 10]], tokens=tokens).wait(20)
    assert _rows(reader, [8, 9, 10]) == [*_rows(owner, [20, 21, 22])[:9], 0, 0, 0]
    with pytest.raises(ConfigError, match="tokens of cache group 1: 0 to 10 is no range within 0 to 9"):
        reader.pull(ticket, [[1, 2, 3], [8, 9, 10]], tokens=[(0, 11), (0, 10)]).wait(20)


def test_readers_follow_tokens_and_read_states_at_the_end(workers: ExitStack) -> None:
    owner, reader = _pair(workers)
    ticket, model = _offered(owner, ready=3, ready_unit=ReadyUnit.TOKENS)
    ours = _ids(MixedSpec(), 8)
    wanted = _poison(reader.pool, 1)
    pull = reader.pull(ticket, ours)
    for ready in (3, 7, 10):
        owner.set_ready("r", ready)
        assert not pull.wait(0)
    owner.set_ready("r", _TOKENS)
    pull.wait(20)
    write(wanted, reader.pool.groups, ours, model, whole(reader.pool.groups, _TOKENS))
    assert _is(reader.pool, wanted)


class _Kernels:
    """Work on a device that ends when the test says so."""

    has_ended = False

    def query(self) -> bool:
        return self.has_ended


def test_readers_wait_for_the_device(workers: ExitStack) -> None:
    owner, reader = _pair(workers)
    kernels = _Kernels()
    ticket, model = _offered(owner, after=kernels)
    ours = _ids(MixedSpec(), 8)
    wanted = _poison(reader.pool, 1)
    pull = reader.pull(ticket, ours)
    assert not pull.wait(0)
    kernels.has_ended = True
    pull.wait(20)
    write(wanted, reader.pool.groups, ours, model, whole(reader.pool.groups, _TOKENS))
    assert _is(reader.pool, wanted)


@pytest.mark.parametrize("connected", [False, True])
def test_nothing_is_written_before_the_step_that_uses_the_blocks_has_ended(
    workers: ExitStack, connected: bool
) -> None:
    owner, reader = _pair(workers)
    ticket, model = _offered(owner)
    if connected:
        reader.connect(ticket)
    step, ours = _Kernels(), _ids(MixedSpec(), 8)
    wanted = _poison(reader.pool, 1)
    pull = reader.pull(ticket, ours, after=step)
    assert not pull.wait(0)
    assert _is(reader.pool, wanted)
    step.has_ended = True
    pull.wait(20)
    write(wanted, reader.pool.groups, ours, model, whole(reader.pool.groups, _TOKENS))
    assert _is(reader.pool, wanted)


def test_a_step_that_does_not_end_ends_the_pull(workers: ExitStack) -> None:
    owner, reader = _pair(workers)
    ticket, _ = _offered(owner)
    reader.connect(ticket)
    before = _poison(reader.pool, 1)
    pull = reader.pull(ticket, _ids(MixedSpec(), 8), after=_Kernels(), timeout_s=0)
    with pytest.raises(TransferTimeout, match="has not ended in time"):
        pull.wait(20)
    assert _is(reader.pool, before)


def test_blocks_of_two_groups_in_the_same_memory_are_refused(workers: ExitStack) -> None:
    owner, reader = _pair(workers)
    ticket, _ = _offered(owner)
    ours = _ids(MixedSpec(), 8)
    before = _poison(reader.pool, 1)
    pull = reader.pull(ticket, [ours[0], ours[0][:1], ours[2]])
    with pytest.raises(ConfigError, match="two cache groups name blocks in the same memory"):
        pull.wait(20)
    assert _is(reader.pool, before)


def test_what_does_not_fit_the_groups_is_refused(workers: ExitStack) -> None:
    owner, reader = _pair(workers)
    ticket, _ = _offered(owner)
    ours = _ids(MixedSpec(), 8)
    with pytest.raises(ConfigError, match="block ids of each of the pool's 3 cache groups, not 2 of them"):
        reader.pull(ticket, ours[:2])
    with pytest.raises(ConfigError, match="3 cache groups, not array"):
        reader.pull(ticket, array("I", [1]))
    with pytest.raises(ConfigError, match="cache group 1 has 1 states there, and 2 here"):
        reader.pull(ticket, [ours[0], [0, 1], ours[2]]).wait(20)
    with pytest.raises(ConfigError, match="`layers` selects layers of one cache group"):
        reader.pull(ticket, ours, layers=(0, 1)).wait(20)
    with pytest.raises(ConfigError, match="tokens of cache group 2: 0 to 2 is no range within 0 to 1"):
        reader.pull(ticket, ours, tokens=[(0, 1), (0, 1), (0, 2)]).wait(20)
    with pytest.raises(ConfigError, match="follow several cache groups by tokens only"):
        owner.offer("blocks", _ids(MixedSpec(), 9), num_tokens=_TOKENS, ready=1)
    with pytest.raises(ConfigError, match="cache group 0: 30 tokens do not fit 3 blocks of 4"):
        owner.offer("many", _ids(MixedSpec(), 9), num_tokens=30)


@pytest.mark.parametrize("tokens", [5, (1, 2, 3), [(0, 1), 2], ["a", "b"], [(0, 1.5)], "ab"])
def test_what_is_no_range_of_tokens_is_refused(workers: ExitStack, tokens: object) -> None:
    owner, reader = _pair(workers)
    ticket, _ = _offered(owner)
    with pytest.raises(ConfigError, match="tokens must be a range"):
        reader.pull(ticket, _ids(MixedSpec(), 8), tokens=tokens)  # type: ignore[arg-type]


def test_one_group_takes_no_list_of_ranges(workers: ExitStack) -> None:
    geometry = Geometry(1, 1, 24, 8, block_tokens=4)
    owner, reader = (
        _worker(workers, BlockPool.allocate(dense(geometry), huge_pages=False), name) for name in "pd"
    )
    with pytest.raises(ConfigError, match=r"tokens \(0, 4\) is no range within 0 to 8"):
        reader.pull(owner.offer("r", [1, 2]), [3, 4], tokens=[(0, 4)]).wait(20)


def test_another_number_of_groups_is_another_model(workers: ExitStack) -> None:
    owner = _worker(workers, MixedSpec().make(), "p")
    ticket, _ = _offered(owner)
    plain = BlockPool.allocate(dense(Geometry(2, 2, 24, 24, block_tokens=4)), huge_pages=False)
    reader = _worker(workers, plain, "d")
    with pytest.raises(LayoutMismatch, match="the number of cache groups differs: 1 here, 3 there"):
        reader.pull(ticket, [1, 2, 3]).wait(20)


def test_a_group_with_other_states_is_another_model(workers: ExitStack) -> None:
    owner = _worker(workers, MixedSpec().make(), "p")
    ticket, _ = _offered(owner)
    reader = _worker(workers, replace(MixedSpec(), total_heads=(2, 8, 8)).make(), "d")
    with pytest.raises(LayoutMismatch, match="cache group 2: total_heads differs: 8 here, 4 there"):
        reader.pull(ticket, _ids(MixedSpec(), 8)).wait(20)
