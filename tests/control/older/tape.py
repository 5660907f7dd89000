# SPDX-License-Identifier: Apache-2.0
"""A conversation over gRPC as bytes: recorded by a relay between two peers, played back in the place of either."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

TRAILER = "kvlink-reason"


@dataclass
class Event:
    """`what`: sent or received (a message), closed (the caller sends no more), ended (by the far end), left."""

    call: int
    method: str
    what: str
    blob: str = ""
    """Hexadecimal."""
    status: str = ""
    sentence: str = ""
    reason: str = ""


@dataclass
class Tape:
    """All calls of one client to one server, in the order in which things happened."""

    events: list[Event] = field(default_factory=list)

    @classmethod
    def load(cls, rows: list[dict[str, Any]]) -> Tape:
        return cls([Event(**row) for row in rows])

    def rows(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in asdict(event).items() if value != ""} for event in self.events]

    def calls(self) -> dict[int, list[Event]]:
        by_call: dict[int, list[Event]] = {}
        for event in self.events:
            by_call.setdefault(event.call, []).append(event)
        return by_call


class AnyService(grpc.GenericRpcHandler):
    """Serves every method as a stream of bytes in both directions, which a call with one message each way is, too."""

    def __init__(self, serve: Callable[[str, AsyncIterator[bytes], Any], Any]) -> None:
        self._serve = serve

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def call(blobs: AsyncIterator[bytes], context: Any) -> None:
            await self._serve(details.method, blobs, context)

        return grpc.stream_stream_rpc_method_handler(call)


async def serving(serve: Callable[[str, AsyncIterator[bytes], Any], Any]) -> tuple[grpc.aio.Server, str]:
    from kvlink.control import Security  # of the checkout that record.py has chosen by now
    from kvlink.control.rpc.admission import Admission

    verifier = Security().verifier("127.0.0.1")
    assert verifier is not None
    server = grpc.aio.server(interceptors=[Admission(verifier, "recorded peer", lambda *_: None)])
    server.add_generic_rpc_handlers((AnyService(serve),))
    port = server.add_insecure_port("127.0.0.1:0")
    verifier.listens(port)
    await server.start()
    return server, f"127.0.0.1:{port}"


class Recorder:
    """Relays to the other end of `channel` and writes down what passes."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.tape = Tape()
        self._channel = channel
        self._num_calls = 0

    async def relay(self, method: str, blobs: AsyncIterator[bytes], context: Any) -> None:
        number, self._num_calls = self._num_calls, self._num_calls + 1

        def note(what: str, **rest: str) -> None:
            self.tape.events.append(Event(number, method, what, **rest))

        call: Any = self._channel.stream_stream(method)()

        async def pass_on() -> None:
            async for blob in blobs:
                note("sent", blob=blob.hex())
                await call.write(blob)
            note("closed")
            await call.done_writing()

        passing = asyncio.create_task(pass_on())
        try:
            while (blob := await call.read()) is not grpc.aio.EOF:
                note("received", blob=blob.hex())
                await context.write(blob)
            note("ended", status="OK")
        except grpc.aio.AioRpcError as error:
            reason = str(dict(error.trailing_metadata() or ()).get(TRAILER, ""))
            note("ended", status=error.code().name, sentence=error.details() or "", reason=reason)
            await context.abort(error.code(), error.details() or "", ((TRAILER, reason),))
        except asyncio.CancelledError:
            note("left")
            raise
        finally:
            passing.cancel()
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()


def save(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
