# SPDX-License-Identifier: Apache-2.0
"""Runs a gRPC service that does nothing, which is the limit for unary calls to any service in Python."""

from __future__ import annotations

import asyncio
import time
from multiprocessing.connection import Connection
from typing import Any

import grpc
import grpc.aio

_SERVICE, _CALL = "kvlink.Empty", "Call"
_REQUEST = bytes(1_100)  # the size of a ticket


async def serve() -> str:
    """Listens on loopback until the event loop ends. Returns "host:port"."""

    async def answer(blob: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        return blob

    server = grpc.aio.server()
    handlers: dict[str, Any] = {_CALL: grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _kept.append(server)
    return f"127.0.0.1:{port}"


def loader(pipe: Connection, index: int, address: str, in_flight: int, count: int) -> None:
    """Runs a load process that makes two consecutive calls per handoff, with `in_flight` handoffs at a time."""

    async def run() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            call: Any = channel.unary_unary(f"/{_SERVICE}/{_CALL}")

            async def lane(first: int) -> None:
                for _ in range(first, count, in_flight):
                    await call(_REQUEST)
                    await call(_REQUEST)

            await call(_REQUEST)
            pipe.send("ready")
            await asyncio.to_thread(pipe.recv)
            start = time.monotonic()
            await asyncio.gather(*map(lane, range(in_flight)))
            pipe.send((start, time.monotonic()))
            await asyncio.to_thread(pipe.recv)

    asyncio.run(run())


_kept: list[grpc.aio.Server] = []  # a server without a reference is stopped
