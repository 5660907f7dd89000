# SPDX-License-Identifier: Apache-2.0
"""Signed tickets: nothing of one can be changed, keys can be, and who has none reads signed tickets as before."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transports.pools import fill, wide

from kvlink import Ticket, Worker, WorkerConfig
from kvlink.control.security.tickets import TicketKeys, ticket_signing
from kvlink.errors import AccessDenied, ConfigError
from kvlink.ticket import LeaseSeat
from kvlink.types import ReadyUnit

Pass = Callable[[Ticket], Ticket]
KEY, OTHER = "k" * 32, "o" * 32
TICKET = Ticket("r", "prefill", 5, "127.0.0.1:1", (LeaseSeat(3, 1011, 1012),), array("I", range(40)), 640, 40)
POOL = wide(num_blocks=16)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n")
    return file


def test_a_signed_ticket_survives_the_wire(file: Path) -> None:
    keys = TicketKeys.of_file(file)
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
    keys = TicketKeys.of_file(file)
    changed = CHANGES[what](keys.sign(TICKET))
    with pytest.raises(
        AccessDenied, match=r"request (r|s|rp): the ticket is .*KVLINK_TICKET_KEYS than .*keys"
    ):
        keys.checked(Ticket.from_bytes(changed.to_bytes()))


def test_keys_change_in_three_steps(file: Path, tmp_path: Path) -> None:
    """Believe the new one everywhere, sign with it, forget the old one: no ticket in flight is refused."""
    owner_file, reader_file = file, tmp_path / "reader"
    reader_file.write_text(f"{KEY}\n")
    owner, reader = TicketKeys.of_file(owner_file, 0.0), TicketKeys.of_file(reader_file, 0.0)
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
        TicketKeys.of_file(file)


@pytest.mark.parametrize("options", [{}, {"tls_cert": "a.pem"}], ids=["plaintext", "tls"])
def test_without_keys_nothing_is_signed_or_checked(options: dict[str, Any]) -> None:
    sign, check = ticket_signing(WorkerConfig(ticket_keys="none", **options))
    assert sign(TICKET) is check(TICKET) is TICKET


def on_loopback(file: Path, token: str, **options: Any) -> tuple[Pass, Pass]:
    """Signs and checks as a worker does that has the token and no other settings."""
    file.write_text(f"{token}\n")
    file.chmod(0o600)
    return ticket_signing(WorkerConfig(token_file=str(file), **options))


def test_a_worker_that_believes_everybody_signs_for_those_who_do_not(tmp_path: Path) -> None:
    sign, believe = on_loopback(tmp_path / "mine", KEY, insecure=True)
    _, check = on_loopback(tmp_path / "the same", KEY)
    assert check(sign(TICKET)).signature
    assert believe(TICKET) is TICKET


def test_on_loopback_the_token_of_the_host_signs(tmp_path: Path) -> None:
    sign, check = on_loopback(tmp_path / "mine", KEY)
    _, check_too = on_loopback(tmp_path / "the same", KEY)
    sign_as_another, refuse = on_loopback(tmp_path / "another", OTHER)
    read = Ticket.from_text(sign(TICKET).to_text())
    assert check(read) is check_too(read) is read
    for forged in (TICKET, sign_as_another(TICKET), *(change(read) for change in CHANGES.values())):
        with pytest.raises(
            AccessDenied, match=r"request (r|s|rp): the ticket is .*KVLINK_TOKEN_FILE of both"
        ):
            check(forged)
    with pytest.raises(AccessDenied):
        refuse(read)


class Tokens:
    """A process that shows the first token and accepts all. A token is found by a look only."""

    def __init__(self, *tokens: str) -> None:
        self.found, self.seen = [*tokens], tokens[:1]

    def prepare(self) -> None:
        raise AssertionError("only servers make a token")

    def shown(self) -> str:
        return "".join(self.seen[:1])

    def known(self, again: bool) -> Sequence[str]:
        if again:
            self.seen = tuple(self.found)
        return self.seen

    def describe_admitted(self) -> str:
        return ""


def test_a_ticket_under_any_token_of_the_user_is_good_and_one_under_a_new_token_is_found_by_a_look() -> None:
    """Processes of one user with other environments show other tokens, and a removed file is made again."""
    tokens = Tokens(KEY)
    reader = TicketKeys.of_host(tokens)
    tokens.found.append(OTHER)
    for token in (OTHER, KEY):
        reader.checked(TicketKeys.of_host(Tokens(token)).sign(TICKET))
    with pytest.raises(AccessDenied):
        reader.checked(TicketKeys.of_host(Tokens("a third one")).sign(TICKET))


def test_without_any_token_tickets_stay_unsigned_and_none_is_believed() -> None:
    keys = TicketKeys.of_host(Tokens())
    assert keys.sign(TICKET) is TICKET
    assert not keys.marked(b"message", keys.mark(b"message"))
    with pytest.raises(AccessDenied, match="is not signed"):
        keys.checked(TICKET)


def worker(name: str, keys: Path | str) -> Worker:
    config = WorkerConfig(ticket_keys=str(keys))
    return Worker(POOL.make(), name, transports="tcp", config=config)


def test_by_default_a_worker_takes_no_ticket_that_was_changed_or_made_up() -> None:
    with worker("prefill", "") as owner, worker("decode", "") as reader:
        ticket = owner.offer("r", [1, 2], readers=2)
        for forged in (replace(ticket, block_ids=array("I", [8, 9])), replace(ticket, signature=b"")):
            with pytest.raises(AccessDenied, match="request r: the ticket is"):
                reader.pull(Ticket.from_text(forged.to_text()), [1, 2])
        assert reader.pull(ticket, [1, 2], settle=False).wait(20)


def test_a_holder_of_a_ticket_cannot_ask_for_other_blocks(file: Path) -> None:
    with worker("prefill", file) as owner, worker("decode", file) as reader, worker("older", "none") as older:
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
