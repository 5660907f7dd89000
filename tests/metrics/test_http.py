# SPDX-License-Identifier: Apache-2.0
"""Clients of the coordinator's HTTP port that send nonsense, or nothing: what is logged, and who is answered."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import ClientSession

from kvlink import __version__
from kvlink.coordinator import Coordinator
from kvlink.coordinator.coordinator import serve
from kvlink.errors import ConfigError
from kvlink.monitoring.status_page import connections
from kvlink.monitoring.status_page.serving import serve_status_page
from kvlink.runtime.log import JsonFormatter


@pytest.fixture
async def url() -> AsyncIterator[str]:
    coordinator = Coordinator()
    await coordinator.start()
    async with serve_status_page(coordinator, "127.0.0.1", 0) as url:
        yield url
    await coordinator.close()


Visit = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def visit(url: str) -> AsyncIterator[Visit]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    yield reader, writer
    writer.close()


async def status_of(url: str, request: bytes) -> bytes:
    async with visit(url) as (reader, writer):
        writer.write(request)
        return (await reader.readline()).split(b" ")[1]


async def test_bad_requests_are_a_few_lines_of_json_without_tracebacks(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    long = b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"
    for _ in range(30):
        assert await status_of(url, long) == b"400"
    assert len(caplog.records) == 10
    lines = [JsonFormatter().format(record) for record in caplog.records]
    assert max(map(len, lines)) < 600
    for line in map(json.loads, lines):
        assert (line["logger"], line["level"], line["event"]) == ("kvlink.http", "warning", "bad request")
        assert line["status"] == 400
    assert "Traceback" not in "".join(lines)
    assert caplog.records[0].exc_info is None


async def test_a_fault_of_ours_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Coordinator):
        async def status(self):  # type: ignore[no-untyped-def]
            raise ZeroDivisionError

    coordinator = Broken()
    await coordinator.start()
    async with serve_status_page(coordinator, "127.0.0.1", 0) as url, ClientSession(url) as session:
        for _ in range(20):
            assert (await session.get("/metrics")).status == 500
    await coordinator.close()
    logged = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(logged) == 10
    assert all(record.exc_info and record.levelno == logging.ERROR for record in logged)


async def test_slow_clients_make_room_for_who_asks(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)
    async with visit(url) as oldest, visit(url) as second, visit(url) as third:
        for _, writer in (oldest, second, third):
            writer.write(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
            await writer.drain()
        assert await status_of(url, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") == b"200"
        with suppress(ConnectionError):
            assert await oldest[0].read() == b"", "hung up on"
        third[1].write(b"x\r\nHost: x\r\n\r\n")
        assert (await third[0].readline()).split(b" ")[1] == b"200", "the others may go on"


async def test_the_page_is_one_answer_that_loads_nothing_from_elsewhere(url: str) -> None:
    async with ClientSession() as session, session.get(f"{url}/") as answer:
        page, policy = await answer.text(), answer.headers["Content-Security-Policy"]
    assert "page.css" not in page
    assert "page.js" not in page
    assert "<main>" in page
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page)
    [script] = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy


@pytest.mark.parametrize(
    ("store", "shown"),
    [
        ("memory", "memory"),
        ("etcd://a:2379,b:2379/prod", "etcd://a:2379,b:2379/prod"),
        ("etcd://root:secret@a:2379,u:secret@b:2379/prod", "etcd://a:2379,b:2379/prod"),
    ],
)
async def test_the_page_knows_what_serves_and_no_password(store: str, shown: str) -> None:
    coordinator = Coordinator(store_name=store)
    address = await coordinator.start()
    async with (
        serve_status_page(coordinator, "127.0.0.1", 0) as url,
        ClientSession() as session,
        session.get(f"{url}/stats.json") as answer,
    ):
        about = (await answer.json())["about"]
    await coordinator.close()
    assert about == {"address": address, "version": __version__, "store": shown, "tls": False, "problem": ""}


def test_the_command_names_its_store_to_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Coordinator] = []

    async def started(coordinator: Coordinator, host: str, port: int) -> str:
        made.append(coordinator)
        raise ConfigError("stop here")

    monkeypatch.setattr(Coordinator, "start", started)
    with pytest.raises(ConfigError, match="stop here"):
        asyncio.run(serve(store="etcd://127.0.0.1:1/prod"))
    assert made[0].about().store == "etcd://127.0.0.1:1/prod"
