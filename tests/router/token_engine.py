# SPDX-License-Identifier: Apache-2.0
"""A server whose answers depend on the tokens before them, as a model's do, and which streams as it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web
from fake_engine import HANDOFF, FakeEngine

MODEL_LIMIT = 23
OF_CHATS = [11, 12, 13]
"""The tokens of any chat."""


def next_token(tokens: list[int]) -> int:
    return (sum(tokens) * 31 + len(tokens)) % 97


def text_of(tokens: list[int]) -> str:
    """Returns the text of tokens, a third of which are parts of the character that ends with the next other one."""
    text = held = ""
    for token in tokens:
        held += f"[{token}]" if token % 3 == 0 else f"t{token} "
        if token % 3:
            text, held = text + held, ""
    return text + "\ufffd" * bool(held)


class TokenEngine(FakeEngine):
    """Streams one token an event. `break_after` ends a stream's connection after so many events, `pause_after` lets it
    wait for `going_on`. Each holds for the next stream only. `kind_of_end` is "cut" or what vLLM says in an event."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.break_after: int | None = None
        self.always_breaks_after: int | None = None
        self.kind_of_end = "cut"
        self.pause_after: int | None = None
        self.going_on = asyncio.Event()
        self.tells_tokens = True
        self.line_end = b"\n"
        self.says: dict[int, bytes] = {}
        """The bytes that come before the event of that number."""
        self.stops_after: int | None = None
        """The last event that it says, after which the body ends properly, with nothing of its own."""
        self.tokens_an_event = 1
        self.hung = asyncio.Event()
        self.holds_back = 0
        """The characters that a parser for chats holds back at the end of each event."""

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": "m", "max_model_len": MODEL_LIMIT}]})

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        if self.hang:
            self.hung.set()
            await asyncio.Event().wait()
        return web.json_response({"prompt": text_of((await request.json())["tokens"])})

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            params = body.get("kv_transfer_params", {})
            handoff = self.handoff if params.get("do_remote_decode") else None
            return web.json_response({"choices": [{"text": "x"}], "kv_transfer_params": handoff})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        breaks, pauses = self.break_after, self.pause_after
        breaks = breaks if self.always_breaks_after is None else self.always_breaks_after
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
            if number == self.stops_after:
                await response.write(self.says.get(number, b""))
                break
            await response.write(self.says.get(number, b"") + event.replace(b"\n", self.line_end))
            number += 1
        await response.write_eof()
        return response

    async def _events(self, is_chat: bool, body: dict[str, Any]) -> AsyncIterator[bytes]:
        prompt = OF_CHATS if is_chat else list(body["prompt"])
        most = _most_tokens(is_chat, body)
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        named = {"id": f"{self.name}-{len(self.asked)}", "object": kind, "created": 1, "model": "m"}
        told = body.get("return_token_ids") and self.tells_tokens

        def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
            return b"data: " + json.dumps(named | {"choices": choices} | more).encode() + b"\n\n"

        if is_chat:
            delta = {"role": "assistant", "content": ""}
            yield event([{"index": 0, "delta": delta}], **({"prompt_token_ids": prompt} if told else {}))
        tokens, shown = list(prompt), len(text_of(prompt))
        if text_of(prompt).endswith("\ufffd"):
            shown = 0  # as vLLM: a prompt that ends within a character is sent with its last one
        for first in range(0, most, self.tokens_an_event):
            new = min(self.tokens_an_event, most - first)
            for _ in range(new):
                tokens.append(next_token(tokens))
            finish = "length" if first + new == most else None
            whole = text_of(tokens).removesuffix("\ufffd")
            end = len(whole) if finish else max(len(whole) - self.holds_back * is_chat, shown)
            text, shown = whole[shown:end], max(end, shown)
            choice = {"index": 0, **({"delta": {"content": text}} if is_chat else {"text": text})}
            choice["finish_reason"] = finish
            if told:
                choice["token_ids"] = tokens[len(tokens) - new :]
                if not is_chat and not first:
                    choice["prompt_token_ids"] = prompt
            yield event([choice])
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {
                "prompt_tokens": len(prompt),
                "completion_tokens": most,
                "total_tokens": len(prompt) + most,
            }
            yield event([], usage=usage)
        yield b"data: [DONE]\n\n"


def _most_tokens(is_chat: bool, body: dict[str, Any]) -> int:
    """As vLLM: a completion without a limit has 16 tokens, a chat as many as the model allows."""
    most = body.get("max_tokens")
    return (MODEL_LIMIT - len(OF_CHATS) if is_chat else 16) if most is None else most


__all__ = ["HANDOFF", "TokenEngine"]
