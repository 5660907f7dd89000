# SPDX-License-Identifier: Apache-2.0
"""One end of a peer's transfers, as a process in the peer's own environment. Needs numpy and the peer, not kvlink.

Each module but `blocks` has `make(blocks, options)`, which gives an `Adapter`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from .blocks import Ids


class Transfer(NamedTuple):
    """One transfer ahead. `run` is timed and returns when the bytes are there; `release` is not timed."""

    run: Callable[[], None]
    release: Callable[[], None]


class Adapter(Protocol):
    """What a peer must do here. One thread."""

    version: str

    def card(self) -> str:
        """What the other end needs in order to connect, as text."""

    def connect(self, card: str) -> None:
        """Meets the other end. Called where transfers begin."""

    def prepare(self, there: Ids, here: Ids) -> Transfer:
        """All that may be done before the blocks are wanted: `there` are blocks of the other end."""
