# SPDX-License-Identifier: Apache-2.0
"""Streams of two servers behind kvlink's router with --migrate: what their clients get, and what moves them."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from chats import pool_flags
from connectors import PATIENT_LEASE_S, kv_transfer
from pair import Tokens, ask, prompt
from servers import Launch, Server, running, vllm

from kvlink.integrations.router.control_socket import asking

MODEL = "llama"
LARGEST = 8192


class Refused(Exception):
    """The router has no server for a new request at the moment."""


@dataclass
class Streamed:
    """The events of one stream, as its client gets them."""

    tokens: Tokens = field(default_factory=list)
    text: str = ""
    times: list[float] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    begun: threading.Event = field(default_factory=threading.Event)

    def read(self, url: str, path: str, body: dict[str, Any], begun_after: int = 8) -> Streamed:
        where = urlsplit(url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=120)
        try:
            connection.request(
                "POST", path, json.dumps(body | {"stream": True}), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            if answer.status == 503:
                raise Refused(answer.read().decode())
            assert answer.status == 200, answer.read()
            for line in answer:
                event = line.decode().strip().removeprefix("data: ")
                if event == "[DONE]":
                    return self
                if event:
                    self._take(json.loads(event))
                if len(self.times) >= begun_after:
                    self.begun.set()
            raise AssertionError(f"the stream broke off after {len(self.times)} events")
        finally:
            self.begun.set()
            connection.close()

    def _take(self, event: dict[str, Any]) -> None:
        self.names.add(f"{event['id']} {event['object']} {event['created']}")
        self.last = event
        for choice in event["choices"]:
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            ids = choice.get("token_ids") or []
            if text or ids:
                self.times.append(time.perf_counter())
            self.tokens += ids
            self.text += text


def launch(name: str, largest: int = LARGEST) -> Launch:
    """A server that can both decode and hand off."""
    config = kv_transfer("KVLinkConnector", lease_s=PATIENT_LEASE_S)
    small_blocks = ("--block-size", "32")  # the smallest on a CPU; on a GPU vLLM's have 16 tokens
    return vllm(f"moves-{name}", MODEL, config, (*pool_flags(384, largest), *small_blocks))


@contextmanager
def two_servers() -> Iterator[list[Server]]:
    """Yields two servers. A test may replace one that it ends."""
    with running(launch(name) for name in "ab") as servers:
        connect(*servers)
        yield servers


def connect(one: Server, other: Server) -> None:
    """Lets each server pull from the other, so that later pulls find a connection."""
    wanted = {"do_remote_decode": True, "do_remote_prefill": False}
    for source, target in ((one, other), (other, one)):
        tokens = prompt(f"from {source.url}", 300)
        handoff = ask(source.url, MODEL, tokens, 1, kv_transfer_params=dict(wanted)).handoff
        assert ask(target.url, MODEL, tokens, 2, kv_transfer_params=handoff).status == 200


def tell(routed: Server, command: str, server: Server) -> None:
    """Sends "drain" or "resume" to the router."""
    with asking(routed.launch.port) as send:
        send(command, server.url)


def decoding(routed: Server, two: list[Server]) -> Server:
    """Returns the one server that decodes now."""
    with asking(routed.launch.port) as send:
        rows = send("servers", "")
    (url,) = [row["server"] for row in rows if row["role"] == "decode" and row["running"]]
    return next(server for server in two if server.url == url)


def body_of(tokens: Tokens, num_new: int, **extra: Any) -> dict[str, Any]:
    """Returns a greedy request whose answer has `num_new` tokens."""
    asked = {"model": MODEL, "prompt": tokens, "max_tokens": num_new, "temperature": 0, "ignore_eos": True}
    return asked | {"return_token_ids": True} | extra
