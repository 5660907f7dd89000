# SPDX-License-Identifier: Apache-2.0
"""The log names each NIC that is removed and that returns."""

from __future__ import annotations

import os
from typing import Any, cast

import pytest
from waiting import until

from kvlink.transfer.engine import CompletionQueue, Port
from kvlink.worker.port_events import PortLog


class Engine:
    """The ports of an engine, as a test sets them. `core` is itself."""

    def __init__(self, *, watches: bool = True) -> None:
        self.core, self.state, self._watches = self, Port("nic0", "", 0, False), watches
        self.queue: CompletionQueue | None = None

    def ports(self) -> list[Port]:
        return [self.state]

    def watch_ports(self, queue: CompletionQueue) -> None:
        self.queue = queue
        if not self._watches:
            raise OSError("no descriptor is left")

    def tell(self, away: str, times_away: int) -> None:
        assert self.queue is not None
        self.state = Port("nic0", away, times_away, False)
        os.eventfd_write(self.queue.fileno(), 1)


async def test_each_loss_and_return_of_a_nic_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    log = PortLog(cast(Any, engine), "w")
    for away, times_away, said in (
        ("its device was removed", 1, "NIC is gone worker=w port=nic0 why=its device was removed"),
        ("", 1, "NIC is back worker=w port=nic0"),
        ("", 2, "NIC is gone worker=w port=nic0 why=it is back already"),
        ("the port is down", 3, "NIC is gone worker=w port=nic0 why=the port is down"),
    ):
        caplog.clear()
        engine.tell(away, times_away)
        await until(lambda: caplog.messages)
        assert caplog.messages == [said]
    log.close()
    log.close()
    assert engine.queue is not None
    assert engine.queue.fileno() < 0


async def test_a_log_that_cannot_begin_leaves_nothing_open() -> None:
    engine = Engine(watches=False)
    with pytest.raises(OSError, match="no descriptor"):
        PortLog(cast(Any, engine), "w")
    assert engine.queue is not None
    assert engine.queue.fileno() < 0
