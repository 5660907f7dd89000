# SPDX-License-Identifier: Apache-2.0
"""Which path was taken to each owner and what was refused, logged at INFO: once, and again when the path changes."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable

from kvlink.transfer.peer import Peer
from kvlink.types import TransportCard

_log = logging.getLogger("kvlink.path")

_MOST_OWNERS = 4096


class PathLog:
    """Of one reader."""

    def __init__(self) -> None:
        self._told: OrderedDict[str, str] = OrderedDict()

    def taken(self, peer: Peer) -> None:
        """A connection was opened."""
        owner = peer.card.worker_id
        if self._told.get(owner) == peer.transport:
            return
        self._told[owner] = peer.transport
        self._told.move_to_end(owner)
        if len(self._told) > _MOST_OWNERS:
            self._told.popitem(last=False)
        refused = _listed((refusal.transport, refusal.reason) for refusal in peer.refused)
        _log.info("reads from owner=%s transport=%s%s", owner, peer.transport, refused)


def log_start(worker_id: str, agent: str, cards: Iterable[TransportCard]) -> None:
    """How peers reach this worker, and by which transports they do not."""
    cards = [*cards]
    able = ",".join(card.name for card in cards if not card.refused)
    refused = _listed((card.name, card.refused) for card in cards if card.refused)
    _log.info("started worker=%s agent=%s transports=%s%s", worker_id, agent, able, refused)


def _listed(refused: Iterable[tuple[str, str]]) -> str:
    return "".join(f"; not {transport}: {reason}" for transport, reason in refused)
