# SPDX-License-Identifier: Apache-2.0
"""Measures what the router adds to a request while many are in flight, beside a client that asks both servers itself.

    python tests/engines/router_times.py [--in-flight 1,64,512] [--seconds 5] [--json]

Prefill and decode are stand-ins that answer at once, so all of the time is HTTP. They and the clients share a process,
and the router has its own. Each client sends its next request after an answer. Both ways run in turns of half a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import quantiles
from typing import Any

from aiohttp import ClientSession, TCPConnector

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from router.fake_engine import FakeEngine

_BODY = {"model": "m", "prompt": list(range(1000)), "max_tokens": 1}
_TURN_S = 0.5
Ask = Callable[[], Awaitable[None]]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-flight", default="1,64,512")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    async with (
        FakeEngine("prefill").serving() as prefill,
        FakeEngine("decode").serving() as decode,
        ClientSession(connector=TCPConnector(limit=0)) as session,
    ):
        command = ["kvlink", "router", "--port", "0", "--prefill", prefill.url, "--decode", decode.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as router:
            try:
                url = await asyncio.to_thread(_url_of, router)
                ways = {"router": _asking(session, url), "direct": _asking(session, prefill.url, decode.url)}
                for count in map(int, options.in_flight.split(",")):
                    row = await _measured(ways, count, options.seconds, router.pid)
                    print(json.dumps(row) if options.json else row, flush=True)
            finally:
                router.terminate()


def _url_of(router: subprocess.Popen[str]) -> str:
    assert router.stdout is not None
    for line in router.stdout:
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            return found[0]
    raise RuntimeError("the router ended before it listened")


def _asking(session: ClientSession, *urls: str) -> Ask:
    async def ask() -> None:
        for url in urls:
            async with session.post(f"{url}/v1/completions", json=_BODY) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

    return ask


async def _measured(ways: dict[str, Ask], count: int, seconds: float, router: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    cpu_s = 0.0
    for _ in range(max(1, round(seconds / _TURN_S))):
        for name, ask in ways.items():
            before = _cpu_s(router)
            until = time.perf_counter() + _TURN_S
            await asyncio.gather(*(_client(ask, until, times[name]) for _ in range(count)))
            cpu_s += (_cpu_s(router) - before) * (name == "router")
    row: dict[str, Any] = {"in_flight": count}
    for name, each in times.items():
        cuts = quantiles(each, n=100)
        row |= {f"{name}_ms": round(cuts[49] * 1e3, 2), f"{name}_p99_ms": round(cuts[98] * 1e3, 2)}
        row |= {f"{name}_per_s": round(len(each) / sum(each) * count)}
    return row | {"router_cpu_ms_per_request": round(cpu_s * 1e3 / len(times["router"]), 3)}


async def _client(ask: Ask, until: float, times: list[float]) -> None:
    while (began := time.perf_counter()) < until:
        await ask()
        times.append(time.perf_counter() - began)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


if __name__ == "__main__":
    asyncio.run(main())
