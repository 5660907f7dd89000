# SPDX-License-Identifier: Apache-2.0
"""Does what an inference server does for a handoff, and nothing else. Usage: server.py prefill|decode COORDINATOR.

Says its URL, and ends with its input.
"""

from __future__ import annotations

import asyncio
import sys

from aiohttp import web
from transports.pools import PoolSpec

from kvlink import Worker, WorkerConfig

BLOCKS = [1, 2]


class Server:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def prefill(self, request: web.Request) -> web.Response:
        name, trace = request.headers["X-Request-Id"], request.headers["traceparent"]
        self._worker.offer(name, BLOCKS, trace=trace, publish=True)
        return web.json_response({"kv_transfer_params": {"request": name}})

    async def decode(self, request: web.Request) -> web.Response:
        name = (await request.json())["kv_transfer_params"]["request"]
        stats = await self._worker.pull(name, BLOCKS)
        return web.json_response({"bytes": stats.num_bytes})


async def main(role: str, coordinator: str) -> None:
    config = WorkerConfig.from_env(coordinator=coordinator, transports="tcp")
    with Worker(PoolSpec().make(), role, config=config) as worker:
        app = web.Application()
        server = Server(worker)
        app.add_routes(
            [
                web.post("/v1/completions", getattr(server, role)),
                web.get("/health", lambda _: asyncio.sleep(0, web.Response())),
            ]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(f"{role} on http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
