# SPDX-License-Identifier: Apache-2.0
"""Logs at INFO the path to each owner and the refused transports, once and again after each change of the path."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable

from kvlink.transfer.peer import Peer
from kvlink.types import TransportCard

_log = logging.getLogger("kvlink.path")

_MOST_OWNERS = 4096


class PathLog:
    """The paths that one reader has logged."""

    def __init__(self) -> None:
        self._logged: OrderedDict[str, str] = OrderedDict()

    def opened(self, peer: Peer) -> None:
        """Logs the path of a new connection unless it is the path logged last for this owner."""
        owner = peer.card.worker_id
        if self._logged.get(owner) == peer.transport:
            return
        self._logged[owner] = peer.transport
        self._logged.move_to_end(owner)
        if len(self._logged) > _MOST_OWNERS:
            self._logged.popitem(last=False)
        refused = _listed((refusal.transport, refusal.reason) for refusal in peer.refused)
        _log.info("reads from owner=%s transport=%s%s", owner, peer.transport, refused)


def log_start(worker_id: str, agent: str, cards: Iterable[TransportCard]) -> None:
    """Logs how peers reach this worker, and which transports are refused."""
    cards = [*cards]
    able = ",".join(card.name for card in cards if not card.refused)
    refused = _listed((card.name, card.refused) for card in cards if card.refused)
    _log.info("started worker=%s agent=%s transports=%s%s", worker_id, agent, able, refused)


def _listed(refused: Iterable[tuple[str, str]]) -> str:
    return "".join(f"; not {transport}: {reason}" for transport, reason in refused)
