# SPDX-License-Identifier: Apache-2.0
"""A server whose answers depend on the tokens before them, as a model's do, and which streams as it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web
from fake_engine import HANDOFF, FakeEngine

OF_CHATS = [11, 12, 13]
"""The tokens of any chat."""


def next_token(tokens: list[int]) -> int:
    return (sum(tokens) * 31 + len(tokens)) % 97


def text_of(token: int) -> str:
    """A third of the tokens are parts of characters, whose text comes with the next one."""
    return "" if token % 3 == 0 else f"t{token} "


class TokenEngine(FakeEngine):
    """Streams one token an event. `break_after` ends a stream's connection after so many events, `pause_after` lets it
    wait for `going_on`. Each holds for the next stream only. `kind_of_end` is "cut" or what vLLM says in an event."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.break_after: int | None = None
        self.kind_of_end = "cut"
        self.pause_after: int | None = None
        self.going_on = asyncio.Event()
        self.tells_tokens = True

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            params = body.get("kv_transfer_params", {})
            handoff = self.handoff if params.get("do_remote_decode") else None
            return web.json_response({"choices": [{"text": "x"}], "kv_transfer_params": handoff})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        breaks, pauses = self.break_after, self.pause_after
        self.break_after = self.pause_after = None
        number = 0
        async for event in self._events(request.path.endswith("/chat/completions"), body):
            if number == breaks:
                if self.kind_of_end == "cut":
                    assert request.transport is not None
                    request.transport.close()  # after what was written
                    raise ConnectionResetError
                await response.write(self.kind_of_end.encode())
                await response.write(b"data: [DONE]\n\n")
                return response
            if number == pauses:
                await self.going_on.wait()
            await response.write(event)
            number += 1
        await response.write_eof()
        return response

    async def _events(self, is_chat: bool, body: dict[str, Any]) -> AsyncIterator[bytes]:
        prompt = OF_CHATS if is_chat else list(body["prompt"])
        tokens, most = list(prompt), body.get("max_tokens") or 20
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        named = {"id": f"{self.name}-{len(self.asked)}", "object": kind, "created": 1, "model": "m"}
        told = body.get("return_token_ids") and self.tells_tokens

        def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
            return b"data: " + json.dumps(named | {"choices": choices} | more).encode() + b"\n\n"

        if is_chat:
            delta = {"role": "assistant", "content": ""}
            yield event([{"index": 0, "delta": delta}], **({"prompt_token_ids": prompt} if told else {}))
        text = ""
        for number in range(most):
            token = next_token(tokens)
            tokens.append(token)
            text = f"{text}[{token}]" if token % 3 == 0 else f"{text}{text_of(token)}"
            finish = "length" if number == most - 1 else None
            shown = text if token % 3 or finish else ""
            choice = {"index": 0, **({"delta": {"content": shown}} if is_chat else {"text": shown})}
            choice["finish_reason"] = finish
            if told:
                choice["token_ids"] = [token]
                if not is_chat and not number:
                    choice["prompt_token_ids"] = prompt
            text = "" if shown else text
            yield event([choice])
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {
                "prompt_tokens": len(prompt),
                "completion_tokens": most,
                "total_tokens": len(prompt) + most,
            }
            yield event([], usage=usage)
        yield b"data: [DONE]\n\n"


__all__ = ["HANDOFF", "TokenEngine"]
