# SPDX-License-Identifier: Apache-2.0
"""Keeps the ticket of each chat's last answer until its next turn, in bounded memory. Does no I/O.

A chat is known by its session id, or by its messages: the next turn begins with those of the last one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from .bodies import Body

SESSION = "X-Session-Id"
"""The header that names a session, also for vLLM. The field `session_id` of a body does the same."""


class _Kept(NamedTuple):
    ticket: Body
    num_bytes: int
    until_s: float


class Chats:
    """The tickets by chat. The ones that were kept first make room for more. `clock` gives seconds."""

    def __init__(
        self, most: int = 4096, most_bytes: int = 64 << 20, kept_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._most = most
        self._most_bytes = most_bytes
        self._kept_s = kept_s
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, body: Body, headers: Mapping[str, str], ticket: Body) -> bool:
        """Keeps the ticket in the answer to this request. Returns False for a request that names no chat."""
        key = next(reversed(_keys(body, headers)), None)
        if key is None:
            return False
        self._forget(key)
        num_bytes = len(json.dumps(ticket))
        self._kept[key] = _Kept(ticket, num_bytes, self._clock() + self._kept_s)
        self._num_bytes += num_bytes
        while self._kept and (len(self._kept) > self._most or self._num_bytes > self._most_bytes):
            self._forget(next(iter(self._kept)))
        return True

    def ticket_for(self, body: Body, headers: Mapping[str, str]) -> Body | None:
        """Returns the ticket of the answer that this request's chat got last, or None."""
        now_s = self._clock()
        while self._kept and next(iter(self._kept.values())).until_s <= now_s:
            self._forget(next(iter(self._kept)))
        for key in _keys_of_earlier(body, headers):
            if key in self._kept:
                return self._kept[key].ticket
        return None

    def _forget(self, key: str) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._num_bytes -= kept.num_bytes


def _keys_of_earlier(body: Body, headers: Mapping[str, str]) -> list[str]:
    """Returns the keys under which an earlier turn may have kept its ticket, the latest turn first."""
    keys = _keys(body, headers)
    if _session(body, headers) is not None:
        return keys
    messages = body["messages"] if keys else []
    answers = [isinstance(one, dict) and one.get("role") == "assistant" for one in messages]
    return [key for key, answered in zip(keys, answers[1:], strict=False) if answered][::-1]


def _keys(body: Body, headers: Mapping[str, str]) -> list[str]:
    """Returns the session's key, or one for the first message, one for the first two, and so on."""
    session, messages = _session(body, headers), body.get("messages")
    if session is not None:
        return [session]
    chain, keys = _owner(body, headers), []
    for message in messages if isinstance(messages, list) else ():
        chain.update(json.dumps(message, sort_keys=True).encode() + b"\n")
        keys.append(chain.hexdigest())
    return keys


def _session(body: Body, headers: Mapping[str, str]) -> str | None:
    name = body.get("session_id") or headers.get(SESSION)
    return f"session {_owner(body, headers).hexdigest()} {name}" if isinstance(name, str) and name else None


def _owner(body: Body, headers: Mapping[str, str]) -> hashlib.blake2b:
    owner = json.dumps([body.get("model"), headers.get("Authorization")])
    return hashlib.blake2b(owner.encode(), digest_size=16)
