# SPDX-License-Identifier: Apache-2.0
"""Servers leave the router's rotation by its control socket, and `kvlink drain` waits for what they still answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="pip install 'kvlink[router]'")

from test_router import BODY, Place
from waiting import until

from kvlink.errors import ConfigError
from kvlink.integrations.router import control_socket, upstream
from kvlink.integrations.router.commands.drain import wait
from kvlink.integrations.router.control_socket import asking

Row = dict[str, Any]


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield await Place(stack).start(control=True)


async def ask(place: Place, command: str, server: str = "") -> list[Row]:
    """As the command line does, on a thread of its own."""

    def call() -> list[Row]:
        with asking(int(place.url.rpartition(":")[2])) as send:
            return send(command, server)

    return await asyncio.to_thread(call)


def states(rows: list[Row]) -> list[tuple[str, str]]:
    return [(row["role"], row["state"]) for row in rows]


async def test_a_draining_server_gets_no_requests(place: Place) -> None:
    leaving = place.prefill[0]
    rows = await ask(place, "drain", leaving.url)
    assert states(rows) == [("prefill", "draining"), ("prefill", "up"), ("decode", "up"), ("decode", "up")]
    for _ in range(4):
        assert (await place.post())[0] == 200
    assert (len(leaving.asked), len(place.prefill[1].asked)) == (0, 4)
    await ask(place, "resume", leaving.url)
    for _ in range(2):
        assert (await place.post())[0] == 200
    assert len(leaving.asked) == 1


async def test_running_requests_are_counted_until_they_end(place: Place) -> None:
    leaving = place.decode[0]
    leaving.hold = asyncio.Event()
    place.decode[1].hold = leaving.hold
    asking_both = [asyncio.create_task(place.post(BODY)) for _ in range(2)]
    await asyncio.gather(leaving.arrived.wait(), place.decode[1].arrived.wait())
    rows = await ask(place, "drain", leaving.url)
    assert [row["running"] for row in rows if row["role"] == "decode"] == [1, 1]
    leaving.hold.set()
    assert [(await answer)[0] for answer in asking_both] == [200, 200]
    rows = await ask(place, "servers")
    assert [row["running"] for row in rows] == [0, 0, 0, 0]


async def test_a_server_that_came_back_unseen_gets_requests_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refused no connection while a probe was made: its process says that it is another one."""
    monkeypatch.setattr(upstream, "_DRAINING_EVERY_S", 0.0)
    leaving = place.decode[0]
    leaving.start_time = "1.7e+09"
    rows = await ask(place, "drain", leaving.url)
    probed = leaving.probes
    await until(lambda: leaving.probes > probed + 3)
    assert await state_of(place, leaving.url) == "draining"
    leaving.start_time = "1.8e+09"

    async def is_up() -> bool:
        return await state_of(place, leaving.url) == "up"

    await until(is_up)
    await ask(place, "drain", place.decode[1].url)
    assert len(rows) == 4


async def state_of(place: Place, url: str) -> str:
    return next(row["state"] for row in await ask(place, "servers") if row["server"] == url)


async def test_the_last_server_drains_only_by_force(place: Place) -> None:
    for role, engines in (("prefill", place.prefill), ("decode", place.decode)):
        await ask(place, "drain", engines[0].url)
        with pytest.raises(ConfigError, match=f"no other {role} server is up; --force"):
            await ask(place, "drain", engines[1].url)
        assert await state_of(place, engines[1].url) == "up"
    assert (await place.post())[0] == 200
    await ask(place, "force", place.decode[1].url)
    assert (await place.post())[0] == 503


async def test_a_server_beside_one_that_is_away_is_the_last(place: Place) -> None:
    await place.kill(place.decode[0])
    assert (await place.post())[0] == 200
    with pytest.raises(ConfigError, match="no other decode"):
        await ask(place, "drain", place.decode[1].url)


async def test_a_server_that_the_router_does_not_have_is_named(place: Place) -> None:
    with pytest.raises(ConfigError, match=r"no server http://nobody; it has http://127"):
        await ask(place, "drain", "http://nobody")


async def test_other_users_are_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_not_own(_: socket.socket) -> bool:
        return threading.current_thread() is not threading.main_thread()  # where the client is

    monkeypatch.setattr(control_socket, "is_own", is_not_own)
    with pytest.raises(ConfigError, match="only the user of the router and root"):
        await ask(place, "drain", place.prefill[0].url)


def test_an_impostor_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as impostor:
        impostor.bind(control_socket.socket_name(1))
        impostor.listen()
        monkeypatch.setattr(control_socket, "is_own", lambda _: False)
        with asking(1) as send, pytest.raises(Exception, match="another user's process"):
            send("drain", "http://a")


def test_without_a_router_the_port_is_named() -> None:
    with asking(2) as send, pytest.raises(ConfigError, match=r"for port 2 .* --router"):
        send("servers", "")


def test_waiting_ends_with_the_last_request_or_the_grace() -> None:
    now = [0.0]

    def slept(seconds: float) -> None:
        now[0] += seconds

    def waited(counts: list[int], notice_s: float, grace_s: float) -> tuple[float, int]:
        now[0], running = 0.0, iter(counts)
        rows = wait(lambda: [{"running": next(running)}], notice_s, grace_s, lambda: now[0], slept)
        return pytest.approx(now[0]), rows[0]["running"]

    assert waited([3, 2, 0], 0.0, 60.0) == (0.4, 0)
    assert waited([5] * 100, 0.0, 1.0) == (1.0, 5)
    assert waited([1, *[0] * 100], 5.0, 60.0) == (5.0, 0), "routers have not noticed yet"
    assert waited([0] * 100, 5.0, 1.0) == (5.0, 0)
