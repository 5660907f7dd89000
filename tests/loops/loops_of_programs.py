# SPDX-License-Identifier: Apache-2.0
"""The loops of kvlink/monitoring and kvlink/cli."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock
from urllib.request import urlopen

from loops.rows import Unexpected, failing, passes, scene
from typer.testing import CliRunner

from kvlink.cli.top import q_pressed
from kvlink.errors import ConfigError
from kvlink.integrations.router.commands import replicate
from kvlink.monitoring.metrics.serving import MetricsPort, _Server
from kvlink.monitoring.status_page import serving
from kvlink.monitoring.status_page.serving import CONNECTION_S, BoundedConnections


class _Closed:
    """Stands for a worker that has no statistics."""

    def stats(self) -> Any:
        raise ConfigError("closed")


@scene("metrics")
def a_port_of_metrics() -> None:
    with failing(_Server, "service_actions"):
        port = MetricsPort(_Closed(), "127.0.0.1", 0)
        at = port._server.server_address[1]
        with urlopen(f"http://127.0.0.1:{at}/metrics") as answer:
            assert b"kvlink_loop_restarts_total" in answer.read()
        with urlopen(f"http://127.0.0.1:{at}/metrics") as answer:
            assert b'{loop="metrics"} 1.0' in answer.read()
    port.close()


@scene("page connections")
async def connections_of_a_page() -> None:
    class Server:
        def __init__(self) -> None:
            self.num_looks = 0
            self.aborted: list[str] = []

        @property
        def connections(self) -> list[Any]:
            self.num_looks += 1
            if self.num_looks == 1:
                raise Unexpected
            return held

    def abort() -> None:
        server.aborted.append("slow")
        held.pop()

    server = Server()
    broken, slow = (
        SimpleNamespace(transport=object()),
        SimpleNamespace(transport=SimpleNamespace(abort=abort)),
    )
    held: list[Any] = [_hashable(broken), _hashable(slow)]
    time = SimpleNamespace(monotonic=asyncio.get_running_loop().time)
    with mock.patch.object(serving, "time", time):
        bounded = BoundedConnections(cast(Any, server))
        await passes(CONNECTION_S + 10.0)
    assert server.aborted == ["slow"]
    bounded.close()


def _hashable(connection: SimpleNamespace) -> Any:
    return type("Connection", (), vars(connection))()


@scene("keyboard")
def a_keyboard() -> None:
    async def press() -> None:
        with q_pressed() as pressed:
            os.write(owner, b"q")
            await pressed

    owner, terminal = os.openpty()
    with os.fdopen(terminal) as stdin, mock.patch.object(sys, "stdin", stdin), failing(os, "read"):
        asyncio.run(press())
    os.close(owner)


@scene("server copy")
def copies_to_servers() -> None:
    def copy(url: str, *_: object) -> dict[str, object]:
        return {"server": url, "seconds": 0.0, "state": "had", "note": ""}

    servers = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    options = ["--model", "a", "--prompt", "b", "--pause-s", "0", "--json"]
    with mock.patch.object(replicate, "_copy", copy), failing(replicate, "_copy"):
        done = CliRunner().invoke(replicate.app, [*servers, *options])
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["state"] for row in rows] == ["failed", "had"]
