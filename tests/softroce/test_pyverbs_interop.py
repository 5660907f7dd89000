# SPDX-License-Identifier: Apache-2.0
"""The wire contract of the verbs transport, proved by two implementations: kvlink's in C++ and one on pyverbs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from transports.pools import PoolSpec, wide
from transports.processes import PeerProcess, eventually

from kvlink import _core
from kvlink.errors import AccessDenied, StaleBlocks

try:
    from softroce.meeting import SEED, TIMEOUT_S, Meeting, expected, offer, rdma_devices
    from softroce.pyverbs_peer.formats import (
        ABORTED_TOMBSTONE,
        EXPIRED_TOMBSTONE,
        SETTLED_TOMBSTONE,
        TABLE_MAGIC,
    )
    from softroce.pyverbs_peer.nic import WorkRefused
    from softroce.pyverbs_peer.reader import Reader
except ImportError as error:
    pytest.skip(
        f"pyverbs cannot be imported ({error}): sudo apt-get install python3-pyverbs, and use the "
        "distribution's own version of Python",
        allow_module_level=True,
    )
for name, _, _, why_not, fix in _core.transports():
    if name == "verbs" and why_not:
        pytest.skip(f"verbs: {why_not}. {fix}", allow_module_level=True)

STINGY = {"mtu": 1, "most_reads": 1}
"""256 bytes a packet, one read at a time: the other end must be content with it."""


@pytest.fixture(scope="module")
def process() -> Iterator[PeerProcess]:
    process = PeerProcess()
    yield process
    process.close()


@pytest.fixture
def meeting(process: PeerProcess) -> Iterator[Meeting]:
    meeting = Meeting(process, rdma_devices(os.environ.get("KVLINK_TEST_RDMA", "")))
    yield meeting
    meeting.close()


# Reads from kvlink.


@pytest.mark.parametrize(
    ("spec", "nic"),
    [
        (PoolSpec(num_blocks=8, order="NHD"), {}),
        (PoolSpec(num_blocks=8, block_tokens=4, order="BESIDE_HND", regions="PER_LAYER"), {}),
        (wide(16, 70_000), STINGY),
    ],
    ids=["NHD", "BESIDE_HND", "stingy"],
)
def test_pyverbs_reads_validates_and_settles(meeting: Meeting, spec: PoolSpec, nic: dict[str, int]) -> None:
    kvlink = meeting.worker(spec)
    ticket = offer(kvlink, [5, 6, 1])
    peer = meeting.reader(kvlink, **nic)
    assert [port.name for port in peer.owner_ports] == [f"{meeting.kvlink_device}:1"]
    assert peer.header()[:2] == (TABLE_MAGIC, ticket.epoch)
    peer.announce(ticket)
    assert np.array_equal(peer.blocks(ticket), expected(spec, ticket))
    assert peer.slot(ticket) == (ticket.seats[0][1], 3)
    peer.settle(ticket)
    assert kvlink.fate_of(ticket.request_id) == "settled"
    assert peer.slot(ticket)[0] == SETTLED_TOMBSTONE


def test_every_port_of_an_owner_has_its_own_keys(meeting: Meeting) -> None:
    devices = rdma_devices("")
    if len(devices) < 3 or os.environ.get("KVLINK_TEST_RDMA"):
        pytest.skip("needs three RDMA devices that reach each other: make test-rdma has them in its guest")
    kvlink = meeting.worker(wide(4), nics=",".join(devices[-3:-1]))
    ticket = offer(kvlink, [2, 1])
    for port in range(2):
        peer = meeting.reader(kvlink, port)
        assert [port.name for port in peer.owner_ports] == [f"{device}:1" for device in devices[-3:-1]]
        assert np.array_equal(peer.blocks(ticket), expected(wide(4), ticket))


def test_a_wrong_settle_nonce_is_ignored(meeting: Meeting) -> None:
    kvlink = meeting.worker(wide(4))
    ticket = offer(kvlink, [1])
    peer = meeting.reader(kvlink)
    slot, nonce, settle_nonce = ticket.seats[0]
    peer.settle(ticket._replace(seats=((slot, nonce, settle_nonce ^ 1 << 8),)))
    time.sleep(1.0)  # many times what the owner takes to look
    assert kvlink.do("events") == []
    assert peer.slot(ticket)[0] == nonce
    peer.settle(ticket)
    assert kvlink.fate_of(ticket.request_id) == "settled"


def test_the_nic_refuses_what_no_key_allows(meeting: Meeting) -> None:
    kvlink = meeting.worker(wide(4))
    ticket = offer(kvlink, [1])

    def refused(break_rule: Callable[[Reader], object]) -> str:
        peer = meeting.reader(kvlink)  # a queue pair does not survive a refusal
        with pytest.raises(WorkRefused) as caught:
            break_rule(peer)
        return caught.value.status

    def read_by_wrong_key(peer: Reader) -> None:
        (key,) = peer.pool
        peer.fetch(key._replace(rkeys=((key.rkeys[0][0] ^ 0xFF,),)), 0, 64)

    assert refused(read_by_wrong_key) == "IBV_WC_REM_ACCESS_ERR"
    assert refused(lambda p: p.fetch(p.pool[0], p.pool[0].num_bytes - 32, 64)) == "IBV_WC_REM_ACCESS_ERR"
    assert refused(lambda p: p.store(p.pool[0], 0, 1)) == "IBV_WC_REM_ACCESS_ERR"
    assert refused(lambda p: p.store(p.leases, 64, 1)) == "IBV_WC_REM_ACCESS_ERR"
    assert refused(lambda p: p.fetch(p.words, 16, 16)) == "IBV_WC_REM_ACCESS_ERR"
    assert refused(lambda p: p.store(p.words, p.words.num_bytes, 1)) == "IBV_WC_REM_ACCESS_ERR"
    peer = meeting.reader(kvlink)
    assert np.array_equal(peer.blocks(ticket), expected(wide(4), ticket))


def test_after_an_abort_the_nonce_has_gone(meeting: Meeting) -> None:
    kvlink = meeting.worker(wide(4))
    ticket = offer(kvlink, [1])
    peer = meeting.reader(kvlink)
    assert peer.slot(ticket)[0] == ticket.seats[0][1]
    kvlink.do("abort", request_id=ticket.request_id)
    assert peer.slot(ticket)[0] == ABORTED_TOMBSTONE


def test_after_expiry_the_nonce_has_gone_and_the_reader_that_said_its_name_is_cut_off(
    meeting: Meeting,
) -> None:
    kvlink = meeting.worker(wide(4))
    late, bystander = meeting.reader(kvlink), meeting.reader(kvlink)
    ticket = offer(kvlink, [1])
    late.announce(ticket)
    kvlink.do("set_ttl", request_id=ticket.request_id, ttl_s=0.05)
    assert kvlink.fate_of(ticket.request_id) == "expired"
    with pytest.raises(WorkRefused, match="IBV_WC_WR_FLUSH_ERR"):
        late.blocks(ticket)
    assert bystander.slot(ticket)[0] == EXPIRED_TOMBSTONE


def test_a_reader_of_an_aborted_lease_is_cut_off_and_one_that_withdrew_is_not(meeting: Meeting) -> None:
    kvlink = meeting.worker(wide(4))
    late, withdrawn = meeting.reader(kvlink), meeting.reader(kvlink)
    ticket = offer(kvlink, [1])
    late.announce(ticket)
    time.sleep(0.1)  # many times what the owner takes to look
    withdrawn.announce(ticket)
    time.sleep(0.1)
    withdrawn.withdraw(ticket)
    kvlink.do("abort", request_id=ticket.request_id)
    assert kvlink.fate_of(ticket.request_id) == "aborted"
    with pytest.raises(WorkRefused, match="IBV_WC_WR_FLUSH_ERR"):
        late.blocks(ticket)
    assert withdrawn.slot(ticket)[0] == ABORTED_TOMBSTONE


def test_a_reader_that_comes_after_the_end_is_cut_off(meeting: Meeting) -> None:
    kvlink = meeting.worker(wide(4))
    ticket = offer(kvlink, [1])
    first, again = meeting.reader(kvlink), meeting.reader(kvlink)
    first.settle(ticket)
    assert kvlink.fate_of(ticket.request_id) == "settled"
    again.announce(ticket)
    time.sleep(0.1)
    with pytest.raises(WorkRefused, match="IBV_WC_WR_FLUSH_ERR"):
        again.blocks(ticket)
    assert first.slot(ticket)[0] == SETTLED_TOMBSTONE


def test_an_idle_reader_stays_connected(meeting: Meeting) -> None:
    kvlink = meeting.worker(wide(4))
    ticket = offer(kvlink, [1])
    peer = meeting.reader(kvlink)
    time.sleep(11)  # the owner has asked twice whether it lives
    assert np.array_equal(peer.blocks(ticket), expected(wide(4), ticket))


# Reads from pyverbs.


@pytest.mark.parametrize(
    ("spec", "slice_bytes", "nic"),
    [
        (PoolSpec(num_blocks=8), 10_007, {}),
        (wide(8, 400_000), 65_537, {}),
        (wide(16, 20_000), 7_000, STINGY),
    ],
    ids=["NHD", "striped", "stingy"],
)
def test_kvlink_reads_validates_and_settles(
    meeting: Meeting, spec: PoolSpec, slice_bytes: int, nic: dict[str, int]
) -> None:
    peer, kvlink = meeting.owner(spec, slice_bytes, **nic), meeting.worker(spec)
    kvlink.do("fill", seed=SEED + 1)
    for blocks, into in ([5, 6, 1], [0, 7, 3]), ([2, 3], [4, 5]):
        ticket = peer.offer(blocks, spec.block_tokens)
        pulled = kvlink.do("pull", ticket=ticket.pack(), into=into, timeout_s=TIMEOUT_S)
        assert pulled["transport"] == "verbs"
        assert kvlink.do("differing", into=into, seed=SEED, blocks=blocks) == 0
        eventually(lambda ticket=ticket: peer.is_settled(ticket))
        assert peer.is_announced(ticket)
    assert kvlink.do("differing", into=[1, 2], seed=SEED + 1, blocks=[1, 2]) == 0
    assert peer.num_connects == 1


def test_an_ended_lease_is_stale(meeting: Meeting) -> None:
    peer, kvlink = meeting.owner(wide(4)), meeting.worker(wide(4))
    ticket = peer.offer([1], 1)
    peer.end(ticket)
    with pytest.raises(StaleBlocks):
        kvlink.do("pull", ticket=ticket.pack(), into=[0], timeout_s=TIMEOUT_S)
    assert not peer.is_settled(ticket)
    eventually(lambda: peer.is_withdrawn(ticket))


def test_a_wrong_key_is_refused(meeting: Meeting) -> None:
    peer, kvlink = meeting.owner(wide(4), wrong_keys=True), meeting.worker(wide(4))
    ticket = peer.offer([1], 1)
    with pytest.raises(AccessDenied):
        kvlink.do("pull", ticket=ticket.pack(), into=[0], timeout_s=TIMEOUT_S)
    assert not peer.is_settled(ticket)


def test_a_reader_that_is_cut_off_begins_again_on_a_new_connection(meeting: Meeting) -> None:
    peer, kvlink = meeting.owner(wide(4)), meeting.worker(wide(4))
    ticket = peer.offer([1, 3], 1, ready=1)  # the reader waits for the second block
    kvlink.do("start_pull", ticket=ticket.pack(), into=[0, 1], timeout_s=TIMEOUT_S)
    eventually(lambda: peer.is_announced(ticket))
    peer.cut()
    peer.end(ticket)
    cut_at = time.monotonic()
    with pytest.raises(StaleBlocks):  # read where it connected again
        kvlink.do("finish_pull")
    assert peer.num_connects == 2
    assert time.monotonic() - cut_at < TIMEOUT_S / 2
    ticket = peer.offer([2], 1)
    kvlink.do("pull", ticket=ticket.pack(), into=[3], timeout_s=TIMEOUT_S)
    assert kvlink.do("differing", into=[3], seed=SEED, blocks=[2]) == 0
    assert peer.num_connects == 2
