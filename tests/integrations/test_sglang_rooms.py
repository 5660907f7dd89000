# SPDX-License-Identifier: Apache-2.0
"""A room belongs to one live request of a process, whatever rooms the router chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from test_sglang_handoff import ROOM as BUSY
from test_sglang_handoff import Server, same, send
from transports.processes import eventually

from kvlink.errors import ConfigError
from kvlink.integrations.sglang.rooms import LiveRooms

ROOM = 5


class Request:
    pass


def test_the_later_of_two_is_refused_until_the_first_has_ended() -> None:
    rooms, first, second = LiveRooms(), Request(), Request()
    assert rooms.assign(ROOM, first) == ""
    assert rooms.assign(ROOM, first) == ""
    assert "bootstrap_room 5" in rooms.assign(ROOM, second)
    assert rooms.owner(ROOM) is first
    rooms.release(ROOM, second)
    assert rooms.assign(ROOM, second) != ""
    assert rooms.assign(ROOM + 1, second) == ""
    rooms.release(ROOM, first)
    assert rooms.assign(ROOM, second) == ""


def test_an_owner_that_is_gone_has_given_its_room_back() -> None:
    rooms, first, second = LiveRooms(), Request(), Request()
    rooms.assign(ROOM, first)
    del first
    assert rooms.assign(ROOM, second) == ""


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def started(*args: Any, **kwargs: Any) -> Server:
        servers.append(Server(*args, **kwargs))
        return servers[-1]

    yield started
    for server in servers:
        server.close()


def test_a_room_that_is_live_has_one_request(start: Callable[..., Server]) -> None:
    """Two prefill servers got one room: the later request is refused, the first gets its own pages."""
    first, second, decode = start("prefill"), start("prefill", lease_s=0.05), start("decode")
    before = [plane[[8, 9]].copy() for plane in decode.kv]
    want = decode.expect([0, 1], [0])
    with pytest.raises(ConfigError, match="another one for each request"):
        decode.expect([8, 9], [1])
    [foreign] = send(second, [replace(want, generation=want.generation ^ 1)], [3, 4])
    decode.incoming.arrived(foreign)
    assert decode.incoming.poll(BUSY) is None
    [chunk] = send(first, [want], [10, 11])
    decode.incoming.arrived(chunk)
    assert eventually(lambda: decode.incoming.poll(BUSY)) == (b"first token",)
    assert same(decode.kv, first.kv, [0, 1], [10, 11])
    assert same(decode.kv, before, [8, 9], [0, 1])


def test_a_room_that_has_ended_is_free_and_its_pulls_have_stopped(start: Callable[..., Server]) -> None:
    prefill, decode = start("prefill"), start("decode")
    [chunk] = send(prefill, [decode.expect([1], [0])], [10])
    decode.incoming.arrived(chunk)
    eventually(lambda: decode.incoming.poll(BUSY))
    again = decode.expect([2], [0])
    assert decode.incoming.poll(BUSY) is None
    prefill.outgoing.end(BUSY)
    [chunk] = send(prefill, [again], [11])
    decode.incoming.arrived(chunk)
    assert eventually(lambda: decode.incoming.poll(BUSY)) == (b"first token",)
    assert same(decode.kv, prefill.kv, [2], [11])
