# SPDX-License-Identifier: Apache-2.0
"""Which seats and transports a pull takes, and pulls between other degrees of tensor parallelism."""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from transports.mixed_pools import MixedSpec, whole, whole_model, write
from transports.pools import PoolSpec, Source, expected, poison, random_contents, same, snapshot
from transports.processes import RemoteWorker

from kvlink import BlockPool, LeaseEnd, LeaseEvent, Ticket, Worker, WorkerConfig
from kvlink.errors import ConfigError, StaleBlocks, UnknownRequest
from kvlink.layout import Geometry, dense, num_seats
from kvlink.ticket import LeaseSeat

LAYOUT = dense(Geometry(num_layers=2, total_heads=2, row_bytes=64, num_blocks=8, block_tokens=4))


@pytest.fixture(params=["loopback", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[list[Worker]]:
    config = WorkerConfig(transports=request.param, lease_slots=32, ticket_keys="none")
    with (
        Worker(BlockPool.allocate(LAYOUT), "owner", config=config) as owner,
        Worker(BlockPool.allocate(LAYOUT), "reader", config=config) as reader,
    ):
        rng = np.random.default_rng(1)
        owner.pool.numpy()[:] = rng.integers(1, 255, owner.pool.numpy().size, np.uint8)
        workers = [owner, reader]
        yield workers
        workers.clear()  # pytest keeps what a fixture gave until after the leak check
    del owner, reader


def seats(*slots: int) -> tuple[LeaseSeat, ...]:
    return tuple(LeaseSeat(slot, secrets.randbits(63) + 256, secrets.randbits(63) + 256) for slot in slots)


def ticket_of(owner: Worker, request_id: str, chosen: tuple[LeaseSeat, ...]) -> Ticket:
    card = owner.card
    ids = array("I", [1, 5])
    return Ticket(request_id, card.worker_id, card.epoch, card.agent, chosen, ids, num_tokens=8, ready=2)


def ended(owner: Worker, within_s: float = 5.0) -> list[LeaseEvent]:
    deadline = time.monotonic() + within_s
    while not (events := owner.events()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return events


def test_the_only_reader_gives_all_seats_back(pair: list[Worker]) -> None:
    owner, reader = pair
    chosen = seats(3, 4, 5, 6)
    owner.offers.grant_at("r", chosen, ttl_s=60)
    pull = reader.pull(ticket_of(owner, "r", chosen), into=[0, 2])
    assert pull.wait(10)
    block = LAYOUT.block_stride
    assert (reader.pool.numpy()[:block] == owner.pool.numpy()[block : 2 * block]).all()
    [event] = ended(owner)
    assert (event.request_id, event.how) == ("r", LeaseEnd.SETTLED)
    owner.offers.grant_at("r", chosen, ttl_s=60)  # the slots are free again, and so is the name


def test_blocks_count_as_pinned_from_when_they_are_handed_off(pair: list[Worker]) -> None:
    owner, _ = pair
    owner.offers.grant_at("r", seats(3), ttl_s=60)
    assert owner.stats().pinned_blocks == 0, "the server's own, so far"
    owner.offers.hand_off("r", 2, ttl_s=60)
    assert owner.stats().pinned_blocks == 2
    owner.offer("s", [1, 2, 3])
    assert owner.stats().pinned_blocks == 5
    owner.abort("r")
    assert owner.stats().pinned_blocks == 3
    with pytest.raises(UnknownRequest):
        owner.offers.hand_off("r", 2, ttl_s=60)


def test_a_request_in_two_pulls_is_settled_once(pair: list[Worker]) -> None:
    owner, reader = pair
    chosen = seats(1, 2)
    owner.offers.grant_at("r", chosen, ttl_s=60)
    ticket = ticket_of(owner, "r", chosen)
    pulls = [reader.pull(ticket, into=[0, 2], layers=(n, n + 1), settle=False) for n in (0, 1)]
    assert all(pull.wait(10) for pull in pulls)
    assert owner.events() == []
    assert pulls[1].settle()
    assert [event.how for event in ended(owner)] == [LeaseEnd.SETTLED]


def test_before_the_grant_and_after_the_end_nothing_passes(pair: list[Worker]) -> None:
    owner, reader = pair
    chosen = seats(7)
    ticket = ticket_of(owner, "r", chosen)
    with pytest.raises(StaleBlocks):
        reader.pull(ticket, into=[0, 2]).wait(10)
    owner.offers.grant_at("r", chosen, ttl_s=3600)
    owner.offers.set_ttl("r", 0.05)
    assert [event.how for event in ended(owner)] == [LeaseEnd.EXPIRED]
    with pytest.raises(StaleBlocks):
        reader.pull(ticket, into=[0, 2]).wait(10)


def test_seats_that_are_taken_are_refused(pair: list[Worker]) -> None:
    owner, _ = pair
    owner.offers.grant_at("a", seats(1, 2), ttl_s=60)
    for wrong in (seats(2), seats(0), seats(4096), ()):
        with pytest.raises(ConfigError):
            owner.offers.grant_at("b", wrong, ttl_s=60)
    with pytest.raises(ConfigError, match="offered already"):
        owner.offers.grant_at("a", seats(3), ttl_s=60)
    owner.offers.grant_at("b", seats(3), ttl_s=60)


_TOKENS = 11
_THEIRS, _OURS = [[3, 9, 4], [7], [7]], [[8, 2, 20], [5], [5]]


def test_every_transport_reads_every_group(transport: str) -> None:
    if transport == "cuda":
        pytest.skip("the groups are in host memory")
    spec, config = MixedSpec(), WorkerConfig(transports=transport, lease_slots=16)
    model = whole_model(spec, _TOKENS, 3)
    with ExitStack() as opened:
        owner, reader = (
            opened.enter_context(Worker(spec.make(), name, config=config)) for name in ("p", "d")
        )
        layouts, regions = spec.layouts(), range(len(owner.pool.regions))
        ranges = whole(layouts, _TOKENS)
        write([owner.pool.numpy(region) for region in regions], layouts, _THEIRS, model, ranges)
        wanted = [reader.pool.numpy(region).copy() for region in regions]
        write(wanted, layouts, _OURS, model, ranges)
        reader.pull(owner.offer("r", _THEIRS, num_tokens=_TOKENS), _OURS).wait(20)
        assert all(np.array_equal(reader.pool.numpy(region), wanted[region]) for region in regions)


_DEGREES = (1, 2, 4, 8)
_TP_TOKENS = 75  # the last block is partial, for either block size
_OWNER_BLOCKS = [9, 2, 17, 4, 11]
_READER_BLOCKS = [3, 12, 7, 1, 15, 0, 8, 19, 5, 2]


def _ranks(spec: PoolSpec) -> list[list[PoolSpec]]:
    return [[replace(spec, tp_rank=rank, tp_size=size) for rank in range(size)] for size in _DEGREES]


@pytest.mark.parametrize(
    ("total_heads", "planes"), [(8, 2), (2, 2), (1, 1)], ids=["heads", "replicas", "mla"]
)
def test_every_degree_reads_every_other(
    transport: str,
    total_heads: int,
    planes: int,
    new_owner: Callable[..., RemoteWorker],
    new_reader: Callable[..., Worker],
) -> None:
    model = PoolSpec(
        num_blocks=20, num_layers=3, total_heads=total_heads, planes_per_layer=planes, row_bytes=48
    )
    whole = Source(model.layout(), random_contents(model.layout(), 5), _OWNER_BLOCKS)
    config = {"transports": transport, "lease_slots": 64}
    owners = [[new_owner(spec, **config) for spec in ranks] for ranks in _ranks(replace(model, order="HND"))]
    reader_spec = replace(model, order="PAIRED_NHD", block_tokens=8)
    readers = [[new_reader(spec, **config) for spec in ranks] for ranks in _ranks(reader_spec)]
    for owner in (owner for ranks in owners for owner in ranks):
        owner.do("fill_share", seed=5)

    for owner_ranks in owners:
        for reader_ranks in readers:
            offers = {
                owner: owner.offer(
                    _OWNER_BLOCKS,
                    f"from {len(owner_ranks)} to {len(reader_ranks)}",
                    num_tokens=_TP_TOKENS,
                    readers=seats,
                )
                for owner in owner_ranks
                if (seats := num_seats(owner.pool.layout(), len(reader_ranks)))
            }
            for reader in reader_ranks:
                before = poison(reader.pool, len(offers))
                assert reader.pull(list(offers.values()), _READER_BLOCKS).wait(20)
                layers = range(model.num_layers)
                tokens = range(_TP_TOKENS)
                after = expected(before, reader.pool.layout, _READER_BLOCKS, [whole], tokens, layers)
                assert same(snapshot(reader.pool), after)
            for owner, ticket in offers.items():
                assert owner.fate_of(ticket.request_id) == "settled"
