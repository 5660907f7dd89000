# SPDX-License-Identifier: Apache-2.0
"""A server that speaks an engine's HTTP, without the engine: remembers what it was asked, answers as it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

HANDOFF = {"do_remote_prefill": True, "remote_host": "h", "of_another_connector": {"deep": [1, None]}}
PIECES = [b'data: {"text": "a"}\n\n', b'data: {"text": "b"}\n\n', b"data: [DONE]\n\n"]


class FakeEngine:
    """`die` says when the connection breaks: at once, after the headers, or after the first piece of a stream."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.status = 200
        self.answer_headers: dict[str, str] = {}
        self.others: list[tuple[str, str, bytes]] = []
        """The method, the path and the body of each request of another path."""
        self.handoff: dict[str, Any] | None = HANDOFF
        self.ticket: dict[str, Any] | None = None
        """That of its answers as decode, if it is asked with parameters for the cache."""
        self.die = ""
        self.hang = False
        self.follows = True
        """As decode: answers a request that names a running prefill. As prefill: says that it announced itself."""
        self.fails_to_follow = False
        self.slow_s = 0.0
        self.hold: asyncio.Event | None = None
        """Answers wait for it."""
        self.probes = 0
        self.start_time = ""
        """When its process began, as its metrics say."""
        self.hangs_at_probes = False
        self.aborted = asyncio.Event()
        self.arrived = asyncio.Event()

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[FakeEngine]:
        """Listens while entered; leaving refuses connections on that port."""
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/completions", self._complete),
                web.post("/v1/chat/completions", self._complete),
                web.post("/inference/v1/generate", self._complete),
                web.post("/detokenize", self._detokenize),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.route("*", "/{path:.*}", self._other),
            ]
        )
        app.on_response_prepare.append(self._add_headers)
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            shutdown_timeout=0.1,
            auto_decompress=False,
            max_field_size=1 << 14,
        )
        await runner.setup()
        begun = _Begun(runner)
        listening = await asyncio.get_running_loop().create_server(begun.accept, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            # asyncio loses a connection whose listener is closed while it is being accepted.
            asyncio.get_running_loop().remove_reader(listening.sockets[0].fileno())
            await begun.all_known()
            listening.close()
            await runner.cleanup()

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(self.answer_headers)

    async def _other(self, request: web.Request) -> web.StreamResponse:
        self.others.append((request.method, request.raw_path, await request.read()))
        self.headers.append(request.headers)
        if self.die == "at once":
            _cut(request)
        if request.raw_path == "/streams":
            return await self._streamed(request)
        return web.json_response({"from": self.name}, status=self.status)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.headers.append(request.headers)
        self.arrived.set()
        if self.die == "at once":
            _cut(request)
        if self._only_names(body) and self.fails_to_follow:
            return web.json_response({"error": {"message": "stale"}}, status=500)
        if self.status != 200:
            return web.json_response({"error": {"message": f"{self.name} says no"}}, status=self.status)
        try:
            if self.hang or (self._only_names(body) and not self.follows):
                await asyncio.Event().wait()
            if self.hold is not None:
                await self.hold.wait()
            await asyncio.sleep(self.slow_s)
            return await self._answer(request, body)
        except asyncio.CancelledError:
            self.aborted.set()
            raise

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            answer = {"model": self.name, "choices": [{"text": "ab"}]}
            params = body.get("kv_transfer_params", {})
            if params.get("do_remote_decode"):
                name = params.get("kvlink_stream")
                output = {"kvlink_announced": name} if name and self.follows else {}
                answer["kv_transfer_params"] = self.handoff and self.handoff | output
            elif params and self.ticket:
                answer["kv_transfer_params"] = self.ticket
            return web.json_response(answer)
        return await self._streamed(request)

    async def _streamed(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if self.die == "after the headers":
            _cut(request)
        for piece in PIECES:
            await response.write(piece)
            if self.die == "after a piece":
                await asyncio.sleep(0.05)
                _cut(request)
            await asyncio.sleep(0.01)
        await response.write_eof()
        return response

    def _only_names(self, body: dict[str, Any]) -> bool:
        params = body.get("kv_transfer_params", {})
        return bool(params.get("do_remote_prefill")) and "kvlink_stream" in params

    async def _models(self, request: web.Request) -> web.StreamResponse:
        answer = await self._other(request)
        models = web.json_response({"object": "list", "data": [{"id": self.name}]})
        return answer if self.status != 200 else models

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        raise web.HTTPNotFound

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f"process_start_time_seconds {self.start_time}\nother 1.0\n")

    async def _health(self, request: web.Request) -> web.StreamResponse:
        self.probes += 1
        if self.hangs_at_probes:
            await asyncio.Event().wait()
        return web.Response()


class _Begun:
    """Counts the accepted connections that the runner, which closes those that it knows, has not been told of yet."""

    def __init__(self, runner: web.AppRunner) -> None:
        assert runner.server is not None
        self._server = runner.server
        self._known = self._server.connection_made
        self._num_unknown = 0
        vars(self._server)["connection_made"] = self._made

    def accept(self) -> asyncio.Protocol:
        self._num_unknown += 1
        return self._server()

    async def all_known(self) -> None:
        """Waits for the connections that are accepted by now, with the listener at rest."""
        await asyncio.sleep(0)  # each of them has a task by now, which has run then
        while self._num_unknown:
            await asyncio.sleep(0)

    def _made(self, *made: Any) -> None:
        self._num_unknown -= 1
        self._known(*made)


def _cut(request: web.Request) -> None:
    """As a process that is killed: the connection is reset in the middle of whatever it was."""
    assert request.transport is not None
    request.transport.abort()
    raise ConnectionResetError


def events(body: bytes) -> list[Any]:
    """The objects of a server-sent stream; raises when it has no proper end."""
    *pieces, end = [part.removeprefix("data: ") for part in body.decode().strip().split("\n\n")]
    assert end == "[DONE]"
    return [json.loads(piece) for piece in pieces]
