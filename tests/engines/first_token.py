# SPDX-License-Identifier: Apache-2.0
"""Times the first token of streamed answers, and prints the times as medians and quartiles."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pair import NUM_NEW, Tokens
from servers import Server

_TIMEOUT_S = 300.0


PAUSE_S = 1.5
"""Idle processes of vLLM spin for a second, and would take the cores from the server that is measured."""


class Timed(NamedTuple):
    """The tokens of an answer, and the time until the first of them, from the call."""

    first_ms: float
    tokens: Tokens


def timed(
    server: Server, model: str, asked: Mapping[str, Any], num_new: int = NUM_NEW, **extra: Any
) -> Timed:
    """Asks for a greedy answer. `asked` is a prompt of token ids, or the messages of a chat."""
    body = {"model": model, "max_tokens": num_new, "temperature": 0, "return_token_ids": True, "stream": True}
    path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
    content = json.dumps({**body, **asked, **extra})
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=_TIMEOUT_S)
    try:
        began = time.perf_counter()
        connection.request("POST", path, content, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        tokens: Tokens = []
        first_ms = 0.0
        for line in answer:
            event = line.decode().strip().removeprefix("data: ")
            if event == "[DONE]":
                break
            new = [token for choice in _choices(event) for token in choice.get("token_ids") or ()]
            if new and not tokens:
                first_ms = (time.perf_counter() - began) * 1e3
            tokens += new
        assert tokens, "the stream has no token"
        return Timed(first_ms, tokens)
    finally:
        connection.close()


def _choices(event: str) -> list[dict[str, Any]]:
    return list(json.loads(event).get("choices", ())) if event else []


def spread(values: Sequence[float]) -> str:
    """Returns the median, with the quartiles in brackets."""
    low, _, high = quantiles(values, n=4, method="inclusive")
    return f"{median(values):.0f} ({low:.0f}-{high:.0f})"


def show(row: Mapping[str, Any], *, as_json: bool) -> None:
    """Prints a row at once, because the next one may take minutes."""
    print(json.dumps(row) if as_json else "  ".join(f"{k}={v}" for k, v in row.items()), flush=True)
