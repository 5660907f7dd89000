# SPDX-License-Identifier: Apache-2.0
"""Sources of relays end at any moment and overwrite their blocks: a relay that succeeds has the right bytes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from kvlink import BlockPool, Relay, Worker
from kvlink.errors import ConfigError, KVLinkError, UnknownRequest
from kvlink.layout import Geometry, dense

_BLOCKS = 512
_SHAPE = Geometry(num_layers=2, total_heads=2, row_bytes=64, num_blocks=_BLOCKS)
_ALL = list(range(_BLOCKS))
_ROUNDS, _ALONE = 10, 2
_FOREIGN = 0xEE


def _planes(worker: Worker) -> Any:
    return worker.pool.numpy().reshape(4, _BLOCKS, -1)


def _end(worker: Worker, request_id: str, delay_s: float) -> None:
    """Ends an offer, and gives its blocks to another request once that is allowed."""
    time.sleep(delay_s)
    try:
        worker.abort(request_id)
    except UnknownRequest:
        return
    while not [event for event in worker.events() if event.request_id == request_id]:
        time.sleep(0.0002)
    _planes(worker)[:] = _FOREIGN


class _Chain:
    """An owner, three workers that read one from the other, and another source."""

    def __init__(self, opened: ExitStack, transport: str) -> None:
        self.owner, self.other, *self.workers = [
            opened.enter_context(Worker(BlockPool.allocate(dense(_SHAPE)), name, transports=transport))
            for name in ("owner", "other", "one", "two", "three")
        ]
        self.outcomes: Counter[str] = Counter()

    def run(self, request_id: str, seed: int, spare: bool, delay_s: float | None) -> float:
        """Returns how long it took. The owner's offer ends after `delay_s`."""
        content = np.random.default_rng(seed).integers(128, size=_planes(self.owner).shape, dtype=np.uint8)
        _planes(self.owner)[:] = _planes(self.other)[:] = content
        began = time.monotonic()
        source = self.owner.offer(request_id, _ALL)
        spares = self.other.split(self.other.offer(request_id, _ALL, readers=3)) if spare else [None] * 3
        ending = threading.Thread(target=_end, args=(self.owner, request_id, delay_s or 0.0))
        if delay_s is not None:
            ending.start()
        relays = []
        for worker, fallback in zip(self.workers, spares, strict=True):
            _planes(worker)[:] = 0xDD
            readers = int(worker is not self.workers[-1])
            relays.append(worker.relay(source, _ALL, readers=readers, fallback=fallback, batch_bytes=1))
            source = relays[-1].ticket or source
        self._judge(relays, content)
        if delay_s is not None:
            ending.join()
        took_s = time.monotonic() - began
        self._end_all(request_id)
        return took_s

    def _judge(self, relays: list[Relay], content: Any) -> None:
        for relay, worker in zip(relays, self.workers, strict=True):
            try:
                relay.wait()
            except KVLinkError as error:
                self.outcomes[type(error).__name__] += 1
                continue
            self.outcomes["valid from two sources" if relay.failed else "valid"] += 1
            assert np.array_equal(_planes(worker), content), f"{relay} has wrong bytes"

    def _end_all(self, request_id: str) -> None:
        for worker in (self.owner, self.other, *self.workers):
            if request_id in {ticket.request_id for ticket in worker.offers.tickets()}:
                worker.abort(request_id)
            while worker.lease_counts().active:
                time.sleep(0.0002)
            worker.events()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["tcp", "shm", "cma", "loopback"])
@pytest.mark.parametrize("spare", [False, True], ids=["alone", "with another source"])
def test_a_relay_that_succeeds_has_the_right_bytes(transport: str, spare: bool) -> None:
    with ExitStack() as opened:
        try:
            chain = _Chain(opened, transport)
        except ConfigError as error:
            pytest.skip(str(error))
        for number in range(_ALONE):  # connects them, and tells how long the others take
            within_s = chain.run(f"alone-{number}", number, spare, None)
        for number in range(_ROUNDS):
            chain.run(f"r{number}", number, spare, within_s * number / _ROUNDS)
    print(transport, dict(chain.outcomes), end=" ")
    if spare:
        assert chain.outcomes.keys() == {"valid", "valid from two sources"}
    else:
        assert chain.outcomes.keys() == {"valid", "StaleBlocks"}
