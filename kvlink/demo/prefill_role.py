# SPDX-License-Identifier: Apache-2.0
"""The prefill side: runs prompts, keeps their K and V in paged blocks, offers the blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvlink import LeaseEnd, LeaseEvent
from kvlink.demo.messages import Reply
from kvlink.demo.model import TinyLlama, cache_planes
from kvlink.demo.paging import NUM_BLOCKS, blocks_for
from kvlink.demo.station import Station
from kvlink.demo.text import tokenize

_TTL_S = 60.0


@dataclass
class _Held:
    """Blocks that some offers share; they come back when the last offer has ended."""

    block_ids: list[int]
    num_offers: int


class PrefillRole:
    """One transport's prefill worker."""

    def __init__(self, transport: str, coordinator: str, patience: float = 1.0) -> None:
        self._ttl_s = _TTL_S * patience
        self._model = TinyLlama()
        self._station = Station("prefill", transport, coordinator)
        self._offers: dict[str, _Held] = {}

    def commands(self) -> Mapping[str, Callable[..., Reply]]:
        """See Role."""
        return {"offer": self.offer, "ended": self.ended}

    def offer(self, request_ids: list[str], prompt: str, publish: bool) -> Reply:
        """Runs the prompt once and offers its blocks once per request id.

        The first generated token is in the reply: it rides on the router's message, beside the ticket.
        """
        tokens = tokenize(prompt)
        cache, first_token = self._model.prefill(tokens)
        held = _Held(self._station.blocks.allocate(blocks_for(len(tokens))), len(request_ids))
        self._station.planes.write(cache_planes(cache), held.block_ids)
        self._offers |= dict.fromkeys(request_ids, held)
        tickets = [
            self._station.worker.offer(
                request_id, held.block_ids, num_tokens=len(tokens), ttl_s=self._ttl_s, publish=publish
            ).to_text()
            for request_id in request_ids
        ]
        digest = self._station.planes.digest(held.block_ids, len(tokens))
        return {"tickets": tickets, "first_token": first_token, "digest": digest}

    def ended(self, timeout_s: float) -> Reply:
        """Waits for all offers to end, and counts what did not end as it should."""
        deadline, num_unsettled = time.monotonic() + timeout_s, 0
        while self._offers and time.monotonic() < deadline:
            for event in self._station.worker.events():
                num_unsettled += event.how is not LeaseEnd.SETTLED
                self._release(event)
            time.sleep(0.001)
        num_leaked = NUM_BLOCKS - self._station.blocks.num_free
        return {"unsettled": num_unsettled + len(self._offers), "leaked_blocks": num_leaked}

    def close(self) -> None:
        """See Role."""
        self._station.close()

    def _release(self, event: LeaseEvent) -> None:
        held = self._offers.pop(event.request_id)
        held.num_offers -= 1
        if not held.num_offers:
            self._station.blocks.free(held.block_ids)


make = PrefillRole
