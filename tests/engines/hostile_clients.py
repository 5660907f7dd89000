# SPDX-License-Identifier: Apache-2.0
"""Clients and agents for hostile_requests.py: raw bytes over sockets, because no library sends such requests."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from hostile_requests import Manner
from pair import Answer

_PATIENCE_S = 120.0
_GARBAGE_BYTES = 65536


def send(url: str, wire: bytes, manner: Manner) -> Answer | None:
    """Sends one request. None: the client left, or the server closed the connection without an answer.

    Raises TimeoutError if nothing comes for two minutes.
    """
    where = urlsplit(url)
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=_PATIENCE_S) as sock:
        try:
            sock.sendall(wire)
            if manner is Manner.WHOLE:
                return _answer_of(sock)
            if manner is Manner.CUT:
                sock.recv(1)
        except (ConnectionError, http.client.HTTPException):
            pass
        return None


def _answer_of(sock: socket.socket) -> Answer:
    response = http.client.HTTPResponse(sock)
    response.begin()
    content = response.read()
    body: Any = {}
    with suppress(ValueError):
        body = json.loads(content)
    choices = body.get("choices") if isinstance(body, dict) else None
    tokens = choices[0].get("token_ids") if choices and response.status == 200 else None
    return Answer(response.status, tokens, body if isinstance(body, dict) else {"body": body})


@contextmanager
def agent(kind: str) -> Iterator[str]:
    """Yields the address of what stands in for an agent: see `Mismatched.agent`."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        if kind != "closed":
            bound.listen()
        if kind == "garbage":
            threading.Thread(target=_answer_garbage, args=(bound,), daemon=True).start()
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def _answer_garbage(listening: socket.socket) -> None:
    with suppress(OSError):  # it is closed at the end
        while True:
            caller, _ = listening.accept()
            with caller, suppress(OSError):
                caller.sendall(os.urandom(_GARBAGE_BYTES))
