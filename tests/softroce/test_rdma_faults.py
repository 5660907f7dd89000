# SPDX-License-Identifier: Apache-2.0
"""Faults of links and leases: pulls fail within a second or go on by another NIC, no late byte lands, and
all heals by itself. The owner reads through rxe1 and rxe2, the reader through rxe3 and rxe4."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from softroce import links
from transports.pairs import POISON, Pair
from transports.processes import PeerProcess, RemoteWorker, eventually

from kvlink.errors import KVLinkError, PeerUnreachable, StaleBlocks, TransferTimeout, TransportUnavailable

NewProcess = Callable[[str], PeerProcess]
Rails = Callable[..., Pair]

pytestmark = pytest.mark.usefixtures("guest_links")

MANY = range(512)  # 8 MiB: striped over every lane
APART = range(0, 1024, 2)  # at the owner: each block is a read of its own
ONE_NIC = ("rxe1:1", "rxe3:1")  # of the owner, of the reader
TWO_NICS = ("rxe1:1,rxe2:1", "rxe3:1,rxe4:1")


@pytest.fixture
def new_process() -> Iterator[NewProcess]:
    """Makes processes that end with the test."""
    with ExitStack() as started:

        def start(nics: str) -> PeerProcess:
            process = PeerProcess(KVLINK_NICS=nics)
            started.callback(process.close)
            return process

        yield start


@pytest.fixture
def rails(new_process: NewProcess) -> Iterator[Rails]:
    """Makes connected pairs over the ports of both ends, two lanes a port."""
    with ExitStack() as opened:

        def make(nics: tuple[str, str], fault: str = "") -> Pair:
            owner, reader = nics
            lanes = 2 * len(reader.split(","))
            pair = Pair(
                new_process(owner), "rails", "verbs", fault, num_blocks=1026, nics=reader, lanes=lanes
            )
            opened.callback(pair.close)
            pair.works()
            return pair

        yield make


def lanes(pair: Pair, **options: Any) -> int:
    """Counts the lanes of the connection that a pull finds now."""
    return pair.pull(pair.offer(range(8)), range(8), timeout_s=30, **options).explain()[0].lanes


def test_a_pull_is_striped_over_both_nics(rails: Rails) -> None:
    pair = rails(TWO_NICS)
    pull = pair.pull(pair.offer(APART), MANY, timeout_s=60)
    assert pull.explain()[0].lanes == 4
    assert pull.explain()[0].nics == ("rxe3:1->rxe1:1 50%", "rxe4:1->rxe2:1 50%")


@pytest.mark.parametrize("dying", ["rxe3", "rxe1"], ids=["the reader's", "the owner's"])
def test_one_of_two_nics_dies_and_the_pull_completes(rails: Rails, dying: str) -> None:
    pair = rails(TWO_NICS)
    ticket = pair.offer(APART)
    pull = pair.start(ticket, MANY, timeout_s=60)
    eventually(lambda: pull.stats.num_bytes > 0)
    with links.down(dying):
        assert pull.wait(60)
        assert pair.holds(MANY, APART)
        eventually(lambda: lanes(pair) == 2, 60)  # of the other NICs alone, once the loss is known


def test_the_only_port_goes_down_in_the_middle_of_a_pull(rails: Rails) -> None:
    pair = rails(ONE_NIC, fault="delay-data=5s@3..999")  # post 1 is works()
    pull = pair.start(pair.offer(APART), MANY, timeout_s=60)
    eventually(lambda: pull.stats.num_bytes > 0)
    with links.down("rxe3"):
        started = time.monotonic()
        with pytest.raises(PeerUnreachable, match="rxe3"):
            pull.wait(60)
        assert time.monotonic() - started < 10  # a second, were the guest not emulated
        landed = pair.blocks().copy()
        time.sleep(0.3)
        assert (pair.blocks() == landed).all()
        with pytest.raises(KVLinkError):
            pair.start(pair.offer([3]), [9], timeout_s=1).wait(30)
    pair.works()


def test_a_port_of_the_reader_goes_down_before_the_pull_starts(rails: Rails) -> None:
    pair = rails(TWO_NICS)
    ticket = pair.offer(APART)
    with links.down("rxe3"):
        pair.pull(ticket, MANY, timeout_s=60)
        eventually(lambda: lanes(pair) == 2, 60)


def test_the_only_port_of_the_reader_goes_down_before_the_pull_starts(rails: Rails) -> None:
    pair = rails(ONE_NIC)
    with links.down("rxe3"), pytest.raises(KVLinkError, match="rxe3:1") as failed:
        pair.start(pair.offer([3]), [9], timeout_s=5).wait(30)
    assert "owner closed" not in str(failed.value)
    pair.works()


def test_a_path_that_swallows_all_costs_the_deadline_and_no_byte_lands_late(rails: Rails) -> None:
    pair = rails(ONE_NIC)
    ticket = pair.offer(APART)
    with links.impaired("rxe1", "netem", "loss", "100%"):
        pull = pair.start(ticket, MANY, timeout_s=2)
        with pytest.raises((TransferTimeout, PeerUnreachable)):
            pull.wait(30)
        landed = pair.blocks().copy()
    time.sleep(0.5)
    assert (pair.blocks() == landed).all()
    assert (landed[list(MANY)] == POISON).any()
    pair.works()


def test_loss_and_delay_only_cost_time(rails: Rails) -> None:
    pair = rails(ONE_NIC)
    with (
        links.impaired("rxe1", "netem", "delay", "2ms", "loss", "1%"),
        links.impaired("rxe3", "netem", "delay", "2ms", "loss", "1%"),
    ):
        pair.pull(pair.offer(range(64)), range(64), timeout_s=60)


def test_an_ended_lease_is_named_though_its_reader_was_cut_off(rails: Rails) -> None:
    """The owner cuts off who announces itself under an ended lease, here long before the reader can know."""
    pair = rails(ONE_NIC, fault="delay-slot=1s@every:1;delay-data=1s@2..999")
    ticket = pair.offer([3])
    pair.owner.do("abort", request_id=ticket.request_id)
    with pytest.raises(StaleBlocks, match="aborted"):
        pair.start(ticket, [9], timeout_s=60).wait(60)
    assert pair.reader.stats().restarts == 1
    pair.works()


def test_a_cancelled_pull_ends_only_when_nothing_can_land(rails: Rails) -> None:
    pair = rails(ONE_NIC)
    for _ in range(5):
        pull = pair.start(pair.offer(APART), MANY, timeout_s=60)
        eventually(lambda pull=pull: pull.stats.num_bytes > 0)
        pull.cancel()
        try:
            assert pull.wait(30)
            continue  # it had ended
        except KVLinkError:
            landed = pair.blocks().copy()
        time.sleep(0.3)
        assert (pair.blocks() == landed).all()
        (path,) = pair.reader.peers()
        # On a busy CPU what is under way may take more than the 200 ms it is given, and ends with the connection.
        assert not path.connection.broken or "did not end" in path.connection.why_broken()
    pair.works()


def test_an_expired_lease_cuts_off_its_reader_and_no_other(rails: Rails, new_process: NewProcess) -> None:
    pair = rails(ONE_NIC)
    (path,) = pair.reader.peers()
    sleeper = new_process("rxe4:1")
    slow = {"transports": "fault+verbs", "fault": "delay-data=3s@3..99", "lanes": 1}
    sleeping = RemoteWorker(sleeper, "sleeper", pair.spec, **slow)
    sleeping.do("pull", ticket=pair.offer([1]).to_text(), into=[2], timeout_s=30)
    late = pair.offer(APART, request_id="overslept")
    sleeping.do("start_pull", ticket=late.to_text(), into=list(MANY), timeout_s=60)
    eventually(lambda: sleeping.do("pulled_bytes") > 0)  # the others of 16 posts take 12 s
    sleeper.stop()
    pair.owner.do("set_ttl", request_id="overslept", ttl_s=0.05)
    assert pair.owner.fate_of("overslept") == "expired"
    assert pair.owner.do("counts")["fenced_readers"] == 1
    sleeper.go_on()
    with pytest.raises((PeerUnreachable, StaleBlocks)):
        sleeping.do("finish_pull")

    pair.pull(pair.offer(range(32)), range(32), timeout_s=30)
    assert pair.reader.peers() == [path]
    assert not path.connection.broken
    sleeping.do("pull", ticket=pair.offer([1]).to_text(), into=[2], timeout_s=30)  # connects again by itself
    sleeping.close()


def test_an_owner_out_of_queue_pairs_refuses_newcomers_by_name_and_serves_on(rails: Rails) -> None:
    pair = rails(ONE_NIC)
    with ExitStack() as readers:
        first, second, third = (
            readers.enter_context(pair.another_reader(name)) for name in ("first", "second", "third")
        )
        with links.limited("rxe1", pair.owner.peer.pid, num_objects=3):
            assert pair.pull(pair.offer([1]), [2], first, timeout_s=30).explain()[0].lanes == 2
            assert pair.pull(pair.offer([1]), [2], second, timeout_s=30).explain()[0].lanes == 1
            with pytest.raises(TransportUnavailable, match=r"rxe1:1 gives no queue pair: .*max_qp"):
                pair.start(pair.offer([1]), [2], third, timeout_s=30).wait(30)
            assert (pair.blocks(third)[2] == POISON).all()
            pair.works()
        pair.pull(pair.offer([1]), [2], third, timeout_s=30)


def test_a_stopped_owner_serves_on(rails: Rails) -> None:
    """One-sided: no thread of the owner takes part."""
    pair = rails(ONE_NIC)
    ticket = pair.offer(range(16))
    pair.owner.peer.stop()  # type: ignore[attr-defined]
    try:
        pair.pull(ticket, range(16), timeout_s=30)
    finally:
        pair.owner.peer.go_on()  # type: ignore[attr-defined]
