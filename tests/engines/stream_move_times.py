# SPDX-License-Identifier: Apache-2.0
"""Prints how long a stream pauses while it moves between two vLLM servers: `python tests/engines/stream_move_times.py`.

The servers have a CPU each, and kvlink's router runs in this process. The pause is the time from the last event of the
first server to the first event of the other one. The bar is two decode steps, the tail's transfer, which is 0 because
the other server computes the tail, and one round trip: a request for one token, less one step. "computed again" is the
time until the other server answers a request with as many tokens, of which it has none.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from aiohttp import ClientSession
from pair import ask
from servers import Server, running
from streams import MODEL, body_of, connect, launch

from kvlink.integrations.router.answering import Answering, Options
from kvlink.integrations.router.control_socket import asking
from kvlink.integrations.router.serving import routing

SIZES = (128, 1024, 4096)
NUM_NEW, DRAINED_AFTER = 160, 20

Row = tuple[float, float, float, float, float, float]
_moves: list[float] = []


def watch_moves() -> None:
    """Notes when the router asks the other server to continue."""
    open_at = Answering.open_at

    async def watched(self: Answering, stack: Any, url: str, asked: Any) -> Any:
        _moves.append(time.perf_counter())
        return await open_at(self, stack, url, asked)

    Answering.open_at = watched  # type: ignore[method-assign]


async def stream(client: ClientSession, tokens: Sequence[int], drained_after: int = 0) -> list[float]:
    """Returns the times of the events of one answer, whose server is drained after some."""
    times: list[float] = []
    source = ""
    async with client.post(
        "/v1/completions", json=body_of(list(tokens), NUM_NEW) | {"stream": True}
    ) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
            if len(times) == drained_after and not source:
                source = await asyncio.to_thread(_drain_what_decodes, answer.url.port)
    assert len(times) >= NUM_NEW - 8, "events were merged"
    if source:
        await asyncio.to_thread(_tell, answer.url.port, "resume", source)
    return times


def _tell(port: int | None, command: str, server: str = "") -> list[dict[str, Any]]:
    with asking(port or 0) as send:
        return send(command, server)


def _drain_what_decodes(port: int | None) -> str:
    rows = _tell(port, "servers")
    (url,) = [row["server"] for row in rows if row["role"] == "decode" and row["running"]]
    _tell(port, "drain", url)
    return str(url)


async def moved(client: ClientSession, two: list[Server], num_tokens: int) -> Row | None:
    """Returns pause, step, round trip, computed again, and the largest gaps with and without a move, in seconds."""
    _moves.clear()
    times = await stream(client, random.choices(range(512), k=num_tokens), DRAINED_AFTER)
    if len(_moves) != 2:  # the first one opened the answer; it ended before the copy
        return None
    at = _moves[-1]
    pause = min(time for time in times if time > at) - max(time for time in times if time <= at)
    stayed = _gaps(await stream(client, random.choices(range(512), k=num_tokens)))
    step = statistics.median(stayed)
    short = await asyncio.to_thread(_seconds_of, two[0], 3)
    again = await asyncio.to_thread(_seconds_of, two[0], num_tokens)
    return pause, step, max(short - step, 0.0), again, max(_gaps(times)), max(stayed)


def _gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def _seconds_of(server: Server, num_tokens: int) -> float:
    begun = time.perf_counter()
    assert ask(server.url, MODEL, random.choices(range(512), k=num_tokens), 1).status == 200
    return time.perf_counter() - begun


async def measure(two: list[Server], rounds: int) -> None:
    urls = [server.url for server in two]
    print(
        "| tokens | pause, ms | decode step | round trip | bar | computed again | largest gap: moved, stayed | moves |"
    )
    print("|---|---|---|---|---|---|---|---|")
    async with (
        routing(urls, urls, options=Options(migrate=True), control=True) as url,
        ClientSession(url) as client,
    ):
        await moved(client, two, 128)
        for num_tokens in SIZES:
            rows = [row for _ in range(rounds) if (row := await moved(client, two, num_tokens)) is not None]
            pause, step, trip, again, gap, stayed = (
                1e3 * statistics.median(column) for column in zip(*rows, strict=True)
            )
            cells = (pause, step, trip, 2 * step + trip, again, gap, stayed)
            print(
                f"| {num_tokens} | {' | '.join(f'{cell:.1f}' for cell in cells)} | {len(rows)} |", flush=True
            )


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    watch_moves()
    with running(replace(launch(name), cpus=cpu) for name, cpu in (("a", "0"), ("b", "1"))) as two:
        connect(*two)
        asyncio.run(measure(two, rounds))


if __name__ == "__main__":
    main()
