# SPDX-License-Identifier: Apache-2.0
"""Signed tickets: nothing of one can be changed, keys can be, and who has none reads signed tickets as before."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from transports.pools import fill, wide

from kvlink import Ticket, Worker, WorkerConfig
from kvlink.control.security.tickets import TicketKeys, ticket_signing
from kvlink.errors import AccessDenied, ConfigError
from kvlink.ticket import LeaseSeat
from kvlink.types import ReadyUnit

KEY, OTHER = "k" * 32, "o" * 32
TICKET = Ticket("r", "prefill", 5, "127.0.0.1:1", (LeaseSeat(3, 1011, 1012),), array("I", range(40)), 640, 40)
POOL = wide(num_blocks=16)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n")
    return file


def test_a_signed_ticket_survives_the_wire(file: Path) -> None:
    keys = TicketKeys(file)
    signed = keys.sign(TICKET)
    read = Ticket.from_text(signed.to_text())
    assert read == signed
    assert keys.checked(read) is read
    assert replace(read, signature=b"") == TICKET
    assert KEY not in repr(keys)


CHANGES: dict[str, Callable[[Ticket], Ticket]] = {
    "request_id": lambda ticket: replace(ticket, request_id="s"),
    "worker_id": lambda ticket: replace(ticket, worker_id="other"),
    "epoch": lambda ticket: replace(ticket, epoch=6),
    "agent": lambda ticket: replace(ticket, agent="10.6.6.6:1"),
    "lease": lambda ticket: replace(ticket, seats=(LeaseSeat(4, 1011, 1012),)),
    "seats": lambda ticket: replace(ticket, seats=ticket.seats * 2),
    "blocks": lambda ticket: replace(ticket, block_ids=array("I", [*range(39), 90])),
    "fewer blocks": lambda ticket: replace(ticket, block_ids=ticket.block_ids[:-1]),
    "tokens": lambda ticket: replace(ticket, num_tokens=639),
    "ready": lambda ticket: replace(ticket, ready=39),
    "unit": lambda ticket: replace(ticket, ready_unit=ReadyUnit.LAYERS),
    "rank": lambda ticket: replace(ticket, rank=1),
    "ranks": lambda ticket: replace(ticket, num_ranks=2),
    "time": lambda ticket: replace(ticket, ttl_s=3600.0),
    "names that run together": lambda ticket: replace(ticket, request_id="rp", worker_id="refill"),
    "model": lambda ticket: replace(ticket, model=ticket.model + 1),
    "signature": lambda ticket: replace(ticket, signature=bytes(16)),
    "no signature": lambda ticket: replace(ticket, signature=b""),
}


@pytest.mark.parametrize("what", CHANGES)
def test_nothing_can_be_changed(file: Path, what: str) -> None:
    keys = TicketKeys(file)
    changed = CHANGES[what](keys.sign(TICKET))
    with pytest.raises(
        AccessDenied, match=r"request (r|s|rp): the ticket is .*KVLINK_TICKET_KEYS than .*keys"
    ):
        keys.checked(Ticket.from_bytes(changed.to_bytes()))


def test_keys_change_in_three_steps(file: Path, tmp_path: Path) -> None:
    """Believe the new one everywhere, sign with it, forget the old one: no ticket in flight is refused."""
    owner_file, reader_file = file, tmp_path / "reader"
    reader_file.write_text(f"{KEY}\n")
    owner, reader = TicketKeys(owner_file, 0.0), TicketKeys(reader_file, 0.0)
    old = owner.sign(TICKET)
    for step in (f"{KEY}\n{OTHER}", f"{OTHER}\n{KEY}"):
        for mine, theirs in ((owner_file, reader_file), (reader_file, owner_file)):
            mine.write_text(step)
            reader.checked(owner.sign(TICKET))
            assert theirs != mine
        reader.checked(old)
    reader_file.write_text(OTHER)
    reader.checked(owner.sign(TICKET))
    with pytest.raises(AccessDenied):
        reader.checked(old)


@pytest.mark.parametrize("content", ["", "short", f"{KEY}\nshort", "\n".join([KEY] * 9), "ü" * 40])
def test_files_without_keys_are_refused(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(ConfigError, match="KVLINK_TICKET_KEYS"):
        TicketKeys(file)


def test_without_keys_nothing_is_signed_or_checked() -> None:
    for config in (WorkerConfig(), WorkerConfig(tls_cert="a.pem", ticket_keys="none")):
        sign, check = ticket_signing(config)
        assert sign(TICKET) is check(TICKET) is TICKET


def worker(name: str, keys: Path | None) -> Worker:
    config = WorkerConfig(ticket_keys=str(keys or ""))
    return Worker(POOL.make(), name, transports="tcp", config=config)


def test_a_holder_of_a_ticket_cannot_ask_for_other_blocks(file: Path) -> None:
    with worker("prefill", file) as owner, worker("decode", file) as reader, worker("older", None) as older:
        fill(owner.pool, 1)
        ticket = owner.offer("r", [1, 2], readers=2)
        own, of_others = Ticket.from_text(ticket.to_text()), replace(ticket, block_ids=array("I", [8, 9]))
        for warm in (False, True):
            for given in (of_others, [of_others], replace(of_others, signature=b"")):
                with pytest.raises(AccessDenied, match="request r: the ticket is"):
                    reader.pull(given, [1, 2], settle=False)
            with pytest.raises(AccessDenied):
                reader.connect(of_others)
            assert reader.pull(own, [1, 2], settle=False).wait(20), warm
        assert older.pull(own, [1, 2], settle=False).wait(20), "one without keys takes all, as before"
        with pytest.raises(AccessDenied, match="is not signed"):
            reader.pull(older.offer("s", [1]), [1])


def test_keys_that_take_long_to_read_hold_up_nobody_else(file: Path) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    with worker("prefill", file) as owner, ThreadPoolExecutor(1) as elsewhere:
        sign = owner.offers.sign

        def signed(ticket: Ticket) -> Ticket:
            if ticket.request_id == "slow":
                begun.set()
                assert goes_on.wait(20)
            return sign(ticket)

        owner.offers.sign = signed
        slow = elsewhere.submit(owner.offer, "slow", [1])
        try:
            assert begun.wait(20)
            assert owner.offer("fast", [2]).signature
            assert [ticket.request_id for ticket in owner.offers.tickets()] == ["fast"]
            with pytest.raises(ConfigError, match="slow is offered already"):
                owner.offer("slow", [3])
        finally:
            goes_on.set()
        assert slow.result(20).signature
        assert len(owner.offers.tickets()) == 2


def test_a_name_that_no_ticket_holds_takes_no_lease(file: Path) -> None:
    with worker("prefill", file) as owner:
        with pytest.raises(ConfigError, match=r"request id has 513 bytes.*it must have 1 to 512 bytes"):
            owner.offer("x" * 513, [1])
        assert owner.lease_counts().granted == 0
