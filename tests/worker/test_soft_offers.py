# SPDX-License-Identifier: Apache-2.0
"""Soft offers: any number of readers, nothing pinned, and no reader keeps what was read behind a revoke."""

from __future__ import annotations

import dataclasses
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from waiting import eventually
from worker.soft_server import HERE, LAYOUT, TURN, Server, blocks_of

from kvlink import Ticket, _core
from kvlink.control.security.tickets import TicketKeys
from kvlink.errors import AccessDenied, ConfigError, PeerUnreachable, StaleBlocks, StaleReason
from kvlink.ticket import SHARED_SEAT, LeaseSeat
from kvlink.transfer.engine import LeaseCounts, SoftLeaseCounts

TRANSPORTS = [
    pytest.param(name, marks=[pytest.mark.skip(reason=f"{name}: {why_not}. {fix}")] if why_not else [])
    for name, _, _, why_not, fix in _core.transports()
    if name not in ("cuda", "verbs")
]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_reader_reads_until_the_blocks_are_revoked(opened: ExitStack, transport: str) -> None:
    server = Server(opened, transport)
    for generation in range(1, 20):
        server.write(TURN, generation)
        ticket = Ticket.from_text(server.owner.offer_soft("turn", TURN).to_text())
        for reader in (*server.readers, *server.readers):
            assert server.outcome(reader, ticket, generation) is None
        assert server.owner.revoke([TURN[generation % 4]]) == 1
        server.write(TURN, 200)
        for reader in server.readers:
            assert server.outcome(reader, ticket, generation) is StaleReason.EVICTED
    counts = server.owner.lease_counts()
    assert (counts.granted, counts.active, counts.fenced_readers) == (0, 0, 0)
    assert server.owner.soft_lease_counts() == SoftLeaseCounts(0, 19, 19, 0, 0)
    assert server.owner.events() == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_pull_that_meets_a_revoke_has_the_old_content_or_none(opened: ExitStack, transport: str) -> None:
    server = Server(opened, transport, inline_us=0)
    for generation in range(1, 60):
        server.write(TURN, generation)
        ticket = server.owner.offer_soft("turn", TURN)
        pulls = [(reader, reader.pull(ticket, HERE, timeout_s=20)) for reader in server.readers]
        server.owner.revoke(TURN[generation % 4 :])
        server.write(TURN[generation % 4 :], 200)
        for reader, pull in pulls:
            try:
                pull.wait()
            except StaleBlocks as stale:
                assert stale.why is StaleReason.EVICTED
            else:
                assert (blocks_of(reader)[:, HERE] == generation).all()


def test_readers_at_once(server: Server) -> None:
    server.write(TURN, 7)
    ticket = server.owner.offer_soft("turn", TURN)
    with ThreadPoolExecutor(4) as threads:
        outcomes = threads.map(
            lambda number: server.outcome(server.readers[number], ticket, 7),
            [number % 2 for number in range(2)],
        )
        assert [*outcomes] == [None, None]


def test_nobody_settles(server: Server) -> None:
    server.write(TURN, 7)
    ticket, reader = server.owner.offer_soft("turn", TURN), server.readers[0]
    assert ticket.soft
    assert "soft" in repr(ticket)
    reader.release(ticket)  # not connected
    pull = reader.pull(ticket, HERE)
    pull.wait()
    assert not pull.stats.settled
    assert pull.settle()
    assert reader.pull(ticket, [], tokens=(0, 0)).wait()
    reader.release(ticket)
    reader.prepare(ticket, HERE).pull(ticket).wait()
    [path] = pull.explain()
    assert path.soft
    assert "soft lease" in str(path)
    assert server.outcome(server.readers[1], ticket, 7) is None
    [link] = reader.stats().links
    assert link.counts.unsettled == 0
    assert server.owner.lease_counts() == LeaseCounts(0, 0, 0, 0, 0, 0, 0.0)
    assert server.owner.soft_lease_counts().active == 1


def test_pinned_offers_are_as_before(server: Server) -> None:
    server.write(TURN, 7)
    ticket = server.owner.offer("pinned", TURN)
    server.owner.offer_soft("turn", TURN)
    assert server.owner.revoke(TURN) == 1
    pull = server.readers[0].pull(ticket, HERE)
    pull.wait()
    assert pull.stats.settled
    assert not pull.explain()[0].soft


def test_growth_is_a_ticket_of_its_own(server: Server) -> None:
    server.write(TURN, 7)
    first, grown = server.owner.offer_soft("chat", TURN[:2]), server.owner.offer_soft("chat", TURN)
    assert server.owner.revoke([TURN[3]]) == 1
    assert server.outcome(server.readers[0], first, 7) is None
    assert server.outcome(server.readers[0], grown, 7) is StaleReason.EVICTED


def test_the_oldest_makes_room_for_every_other_offer(server: Server) -> None:
    server.write(TURN, 7)
    tickets = [server.owner.offer_soft(f"chat-{number}", [block]) for number, block in enumerate(TURN)]
    pinned = server.owner.offer("pinned", TURN)
    newest = server.owner.offer_soft("newest", TURN)
    outcomes = [server.outcome(server.readers[0], ticket, 7) for ticket in (*tickets, newest)]
    assert outcomes == [StaleReason.REUSED, StaleReason.REUSED, None, None, None]
    assert server.outcome(server.readers[1], pinned, 7) is None
    assert server.owner.soft_lease_counts() == SoftLeaseCounts(3, 5, 0, 2, 0)
    eventually(server.owner.events)  # the slot of the pinned one is free
    for number in range(4):
        server.owner.offer(f"pinned-{number}", TURN)
    with pytest.raises(ConfigError, match="full of leases that pin"):
        server.owner.offer_soft("none", TURN)


def test_an_owner_that_is_closed(server: Server) -> None:
    server.write(TURN, 7)
    ticket = server.owner.offer_soft("turn", TURN)
    server.owner.close()
    assert server.owner.revoke(TURN) == 0
    with pytest.raises(ConfigError, match="closed"):
        server.owner.offer_soft("turn", TURN)
    with pytest.raises(PeerUnreachable):
        server.readers[0].pull(ticket, HERE, timeout_s=20).wait()


def test_a_reader_finds_what_it_has_in_common(server: Server) -> None:
    digests = [bytes([number]) * 16 for number in range(4)]
    ticket = Ticket.from_text(server.owner.offer_soft("turn", TURN, digests=digests).to_text())
    assert ticket.common_tokens(digests) == 16
    assert ticket.common_tokens([*digests[:3], b"another turn"]) == 12
    assert ticket.common_tokens([each + b"longer" for each in digests] * 2) == 16
    assert ticket.common_tokens([]) == ticket.common_tokens([bytes(15)]) == 0
    assert server.owner.offer_soft("turn", TURN).common_tokens(digests) == 0


def test_a_reader_pulls_what_its_own_cache_lacks(server: Server) -> None:
    server.write(TURN, 7)
    digests = [bytes([number]) * 8 for number in range(4)]
    ticket = server.owner.offer_soft("turn", TURN, digests=digests)
    reader = server.readers[0]
    blocks_of(reader)[:] = 1
    common = ticket.common_tokens([*digests[:3], bytes(8)])
    pull = reader.pull(ticket, HERE, tokens=(4, common))
    pull.wait()
    assert (blocks_of(reader)[:, HERE[1:3]] == 7).all()
    assert (np.delete(blocks_of(reader), HERE[1:3], axis=1) == 1).all()
    assert pull.stats.num_bytes == 2 * LAYOUT.block_bytes


def test_a_signature_covers_the_digests(opened: ExitStack, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k" * 32)
    server = Server(opened, "loopback", ticket_keys=str(keys))
    server.write(TURN, 7)
    ticket = server.owner.offer_soft("turn", TURN, digests=[bytes(8)])
    assert server.outcome(server.readers[0], ticket, 7) is None
    blob = bytearray(ticket.to_bytes())
    blob[-1] ^= 1
    blob[8:12] = zlib.crc32(blob[12:]).to_bytes(4, "little")
    with pytest.raises(AccessDenied):
        TicketKeys.of_file(keys).checked(Ticket.from_bytes(bytes(blob)))


def test_a_scheduler_chooses_the_seat(server: Server) -> None:
    server.write(TURN, 7)
    given = server.owner.offer_soft("turn", TURN)
    seat = LeaseSeat(2, 1 << 60, SHARED_SEAT)
    server.owner.grant_soft_at(seat, TURN)
    ticket = server.owner.offers.sign(dataclasses.replace(given, seats=(seat,)))
    assert server.outcome(server.readers[0], ticket, 7) is None
    assert server.owner.revoke(TURN) == 2
    for wrong in (LeaseSeat(9, 1 << 60, SHARED_SEAT), LeaseSeat(2, 1 << 60, 1 << 61)):
        with pytest.raises(ConfigError, match="shared seat"):
            server.owner.grant_soft_at(wrong, TURN)
