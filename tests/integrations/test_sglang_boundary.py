# SPDX-License-Identifier: Apache-2.0
"""Whatever comes from outside is compared once, refused with a reason, and ends neither a thread nor another room."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import sglang_stand_in as sglang
from sglang_servers import make_backend

from kvlink.errors import ConfigError
from kvlink.integrations.sglang.bootstrap import (
    NOWHERE,
    check_registration,
    check_server,
    checked_dp_ranks,
    checked_rank,
    problem_of_address,
)
from kvlink.integrations.sglang.messages import MAX_FRAMES, Want
from kvlink.integrations.sglang.wants import RETRY_S, Wants
from kvlink.runtime.supervised import failures

ROOM = 5
WANT = Want(ROOM, 1, "10.0.0.1", 7000, 8, 0, 2, 2, 32, False)
SECOND = replace(WANT, generation=2, dst_port=7001, tp_rank=1)
REGISTRATION = {
    "attn_tp_size": 2, "attn_tp_rank": 1, "attn_cp_size": 1, "attn_cp_rank": 0, "attn_dp_size": 1, "attn_dp_rank": 3,
    "pp_size": 1, "pp_rank": 0, "system_dp_size": 4, "system_dp_rank": 3, "rank_ip": "::1", "rank_port": 7000,
    "page_size": "16",
}  # fmt: skip


class Table:
    """The wants of a prefill rank, with a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.wants = Wants(lambda want: "misfit" if want.total_heads == 9 else "", 300.0, lambda: self.now)

    def open(self) -> list[str]:
        return [self.wants.arrived(want) for want in self.wants.open(ROOM, {})]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (WANT, ""),  # said twice
        (replace(WANT, generation=3), ""),
        (SECOND, ""),
        (replace(WANT, dst_port=7001), "already handed off to the decode server at 10.0.0.1:7000"),
        (replace(WANT, endpoint="10.0.0.2"), "already handed off to the decode server at 10.0.0.1:7000"),
        (replace(SECOND, prefix_tokens=16), "disagree"),
        (replace(SECOND, total_heads=9), "misfit"),
        (replace(SECOND, tp_size=4), "disagree"),
    ],
)
@pytest.mark.parametrize("is_open", [False, True])
def test_which_wants_join_one_another(other: Want, reason: str, is_open: bool) -> None:
    table = Table()
    if is_open:
        table.open()
    assert table.wants.arrived(WANT) == ""
    answer = table.wants.arrived(other)
    assert answer == reason or (reason and reason in answer)
    if not is_open:
        table.open()
    assert table.wants.is_complete(ROOM) is (other == SECOND)


def test_nothing_joins_wants_that_are_complete() -> None:
    table = Table()
    table.open()
    for want in (WANT, SECOND, WANT, SECOND):
        assert table.wants.arrived(want) == ""
    assert "an earlier attempt of this decode server" in table.wants.arrived(replace(WANT, generation=3))
    assert "other decode ranks" in table.wants.arrived(replace(WANT, dst_port=7002, tp_rank=3, tp_size=2))
    assert table.wants.sizes() == (1, 0)


def test_a_want_of_an_attempt_that_has_ended_is_refused_with_its_reason() -> None:
    table = Table()
    table.open()
    table.wants.arrived(WANT)
    table.wants.end(ROOM, "no memory", failed=True)
    assert table.wants.arrived(WANT) == "no memory"
    assert table.wants.arrived(replace(WANT, generation=3)) == ""  # the next attempt's, perhaps
    assert table.open() == [""]


def test_a_want_after_a_failure_waits_for_another_attempt_only_shortly() -> None:
    table = Table()
    table.open()
    table.wants.end(ROOM, "no memory", failed=True)
    table.wants.arrived(WANT)
    table.now = RETRY_S - 1
    assert list(table.wants.overdue()) == []
    table.now = RETRY_S
    [refusal] = table.wants.overdue()
    assert refusal.want == WANT
    assert "no memory" in refusal.reason
    assert table.wants.arrived(WANT) == refusal.reason
    assert table.wants.sizes() == (0, 0)


def test_a_failure_is_forgotten_when_another_attempt_begins() -> None:
    table = Table()
    table.open()
    table.wants.end(ROOM, "no memory", failed=True)
    table.open()
    table.wants.end(ROOM, "", failed=False)
    table.wants.arrived(WANT)
    table.now = RETRY_S
    assert list(table.wants.overdue()) == []
    table.now = 300.0
    [refusal] = table.wants.overdue()
    assert refusal.reason == f"no request with bootstrap_room {ROOM} came to this prefill server within 300 s"


def test_held_wants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvlink.integrations.sglang import wants

    monkeypatch.setattr(wants, "_MAX_HELD", 3)
    monkeypatch.setattr(wants, "_MAX_ENDED", 3)
    table = Table()
    answers = [table.wants.arrived(replace(WANT, room=room, generation=room)) for room in range(1, 6)]
    assert answers[:3] == [""] * 3
    assert all("ask again later" in answer for answer in answers[3:])
    for room in range(1, 10):
        table.wants.open(room, {})
        table.wants.end(room, "", failed=True)
    assert len(table.wants._failed) == 3
    assert len(table.wants._spent) <= 3


@pytest.mark.parametrize(
    ("generation", "port", "is_running"),
    [(1, 7000, True), (None, 7000, True), (9, 7000, False), (9, 1, False)],
)
def test_an_abort_ends_the_attempt_that_it_is_about(
    generation: int | None, port: int, is_running: bool
) -> None:
    table = Table()
    assert not table.wants.aborted(ROOM, generation, ("10.0.0.1", port))
    table.open()
    table.wants.arrived(WANT)
    assert table.wants.aborted(ROOM, generation, ("10.0.0.1", port)) is is_running


def test_an_abort_takes_back_a_want_that_is_held() -> None:
    table = Table()
    for want in (WANT, SECOND):
        table.wants.arrived(want)
        assert not table.wants.aborted(ROOM, want.generation, want.address)
    assert table.wants.sizes() == (0, 0)
    assert table.open() == []


BAD_REGISTRATIONS: list[Any] = [
    [], None, {}, *({**REGISTRATION, name: value} for name, value in {
        "attn_tp_size": 0, "attn_tp_rank": 2, "pp_size": "x", "system_dp_size": 10**9, "rank_ip": 7, "rank_port": 0,
        "page_size": None, "attn_cp_size": True, "attn_cp_rank": 1.5,
    }.items()),
]  # fmt: skip


@pytest.mark.parametrize("data", BAD_REGISTRATIONS)
def test_ranks_that_cannot_be_are_not_registered(data: Any) -> None:
    with pytest.raises(ConfigError):
        check_registration(data, {})


def test_ranks_of_another_size_are_not_registered() -> None:
    check_registration(REGISTRATION, {"attn_tp_size": 2, "pp_size": None})
    with pytest.raises(ConfigError, match="attn_tp_size is 4 for the ranks that are registered, not 2"):
        check_registration(REGISTRATION, {"attn_tp_size": 4})


@pytest.mark.parametrize(
    ("address", "is_one"),
    [("10.0.0.1:8998", True), ("[::1]:1", True), ("host-1.example:65535", True), (":8998", False), ("h:0", False),
     ("h:x", False), ("h:-1", False), ("\ud800:1", False), ("http://[:1", False), ("a@b:1", False), ("", False),
     ("a" * 256 + ":1", False), (f"{NOWHERE}:1", False)],
)  # fmt: skip
def test_addresses_of_no_bootstrap_server_are_refused(address: str, is_one: bool) -> None:
    assert bool(problem_of_address(address)) is not is_one


@pytest.mark.parametrize(
    "answer",
    [[], "x", None, {}, {"rank_ip": "a b", "rank_port": 1}, {"rank_ip": "a/", "rank_port": 1},
     {"rank_ip": "\ud800", "rank_port": 1}, {"rank_ip": "a" * 256, "rank_port": 1},
     {"rank_ip": "a", "rank_port": 65536}, {"rank_ip": "a", "rank_port": "9" * 5000}],
)  # fmt: skip
def test_answers_about_ranks_are_checked(answer: Any) -> None:
    with pytest.raises(ConfigError):
        checked_rank(answer)


def test_what_bootstrap_servers_say_is_taken_over_if_it_can_be() -> None:
    assert checked_rank({"rank_ip": "h", "rank_port": "7", "x": 1}) == {
        "rank_ip": "h",
        "rank_port": 7,
        "x": 1,
    }
    assert checked_dp_ranks({"7": 1, "8": "x", "9": -1, "10": True, "11": 10**9}) == {"7": 1}
    assert checked_dp_ranks([1]) == {}
    sizes = dict.fromkeys(("attn_tp_size", "attn_cp_size", "pp_size", "dp_size"), 2)
    check_server(SimpleNamespace(**sizes))
    for wrong in (0, 10**9, None):
        with pytest.raises(ConfigError, match="pp_size must be an integer from 1 to 4096"):
            check_server(SimpleNamespace(**{**sizes, "pp_size": wrong}))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return make_backend(monkeypatch)


def listening(
    handlers: dict[bytes, Callable[[list[bytes]], None]], each_round: Callable[[], None] = lambda: None
) -> tuple[sglang.Socket, Any]:
    from kvlink.integrations.sglang.listener import BoundedSocket, Listener

    socket = sglang.Socket()
    return socket, Listener(socket, BoundedSocket(socket).recv_multipart, handlers, each_round)


def test_no_message_ends_the_listener(backend: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    got: list[bytes] = []

    def fails(frames: list[bytes]) -> None:
        raise LookupError("nobody expects this")

    socket, listener = listening({b"A": fails, b"B": lambda frames: got.append(frames[1])}, lambda: fails([]))
    before = failures().get("sglang-listener", 0)
    for parts in ([b"A", b"1"], [b"B", b"2"], [b""], [b"C"], [b"B"] * (MAX_FRAMES + 1), [b"B", b"3"]):
        socket.deliver(parts)
        assert listener.step()
    assert got == [b"2", b"3"]
    assert not socket.frames
    assert failures()["sglang-listener"] == before + 7


@pytest.mark.parametrize("code", [errno.EFAULT, errno.ENOTSOCK])
def test_the_listener_ends_with_its_socket_and_with_nothing_else(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    socket, listener = listening({})

    def fails(timeout_ms: int) -> bool:
        raise sglang.ZMQError(code)

    monkeypatch.setattr(socket, "poll", fails)
    if code == errno.ENOTSOCK:
        assert listener.run() is None
    else:
        with pytest.raises(sglang.ZMQError):
            listener.run()  # the supervisor runs it again
