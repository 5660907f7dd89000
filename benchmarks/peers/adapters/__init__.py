# SPDX-License-Identifier: Apache-2.0
"""Runs one end of a peer's transfers, as a process in the peer's environment. Needs numpy and the peer, not kvlink.

Each module except `blocks` has `make(blocks, options)`, which returns an `Adapter`. The option `requests` says how many
transfers are started at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from .blocks import Ids


class Transfer(NamedTuple):
    """A prepared transfer of one request. The calls of `start` and `finish` are timed: those of all requests are
    started, then all are finished, in order. The bytes are there once `finish` returns. `release` is not timed.
    """

    start: Callable[[], None]
    finish: Callable[[], None]
    release: Callable[[], None]


class Adapter(Protocol):
    """The interface of a peer. It is used by one thread."""

    version: str

    def card(self) -> str:
        """Returns, as text, what the other end needs in order to connect."""

    def connect(self, card: str) -> None:
        """Connects to the other end. It is called at the end where transfers begin."""

    def prepare(self, there: Ids, here: Ids) -> Transfer:
        """Prepares a transfer as far as possible before the blocks are wanted. `there` are blocks of the other end."""
