# SPDX-License-Identifier: Apache-2.0
"""Replies to clients: with a server's answer, piece by piece, or with an error of the router's own."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from .bodies import HANDOFF, Body, encoded, end_to_end, handoff_of, object_in
from .retries import Answer
from .upstream import BROKEN, gathered

_log = logging.getLogger("kvlink.integrations.router")

Keep = Callable[[Body], None]
"""Keeps the ticket of an answer."""


async def passed_on(
    request: web.Request,
    request_id: str,
    answer: Answer,
    rest: AsyncIterator[bytes],
    keep: Keep | None = None,
    named: Body | None = None,
) -> web.StreamResponse:
    """Streams an answer to the client. If it breaks off, the connection is aborted, so it does not look complete.

    With `keep`, the ticket in a JSON answer goes there, and `named` once another one is complete.
    """
    response = await begun(request, answer)
    is_json = answer.headers.get("Content-Type", "").startswith("application/json")
    try:
        begin = answer.begin
        if keep is not None and is_json:
            begin = _without_ticket(await gathered(rest, begin), keep)
        await response.write(begin)
        async for piece in rest:
            await response.write(piece)
        if keep is not None and named is not None and not is_json and answer.status == 200:
            keep(named)  # now, because the client's next turn may come at once
        await response.write_eof()
    except BROKEN as error:
        _log.warning("an answer broke off request=%s error=%r", request_id, error)
        abort(request)
    return response


async def begun(request: web.Request, answer: Answer) -> web.StreamResponse:
    """Sends the status and the headers of an answer. The caller writes the body."""
    response = web.StreamResponse(status=answer.status, headers=end_to_end(answer.headers))
    await response.prepare(request)
    return response


def abort(request: web.Request) -> None:
    """Breaks the connection to the client, because its answer is not complete."""
    if request.transport is not None:
        request.transport.abort()


def whole(answer: Answer) -> web.Response:
    """Returns an answer that was read completely."""
    return web.Response(status=answer.status, body=answer.begin, headers=end_to_end(answer.headers))


def error(status: int, message: str) -> web.Response:
    """Returns an error in the format of OpenAI's API."""
    return web.json_response(
        {"error": {"message": message, "type": "router_error", "code": status}}, status=status
    )


def _without_ticket(whole: bytes, keep: Keep) -> bytes:
    answer = object_in(whole)
    ticket = handoff_of(answer)
    if answer is None or ticket is None:
        return whole
    keep(ticket)
    del answer[HANDOFF]
    return encoded(answer)
