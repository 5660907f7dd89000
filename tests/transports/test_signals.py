# SPDX-License-Identifier: Apache-2.0
"""Python's signal handlers run while the main thread waits. A timer of the kernel sends the signal."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

import kvlink
from kvlink.layout import Geometry, dense

pytestmark = pytest.mark.verify

LAYOUT = dense(Geometry(num_layers=1, total_heads=1, row_bytes=64, num_blocks=8))
DEADLINE_S = 20.0
"""When the pull would end by itself, with an error, and the signal handler run too late."""
Handler = Callable[[int, FrameType | None], None]


class Interrupted(Exception):
    """Is the exception that a handler raises."""


@pytest.fixture
def after_a_moment() -> Iterator[Callable[[Handler], None]]:
    before = signal.getsignal(signal.SIGALRM)

    def arm(handler: Handler) -> None:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)

    yield arm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("transport", ["loopback", "shm", "cma", "tcp"])
def test_a_handler_that_raises_ends_the_wait_and_not_the_pull(
    transport: str, after_a_moment: Callable[[Handler], None]
) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    pool = kvlink.BlockPool.allocate(LAYOUT)
    with (
        kvlink.Worker(pool, "owner", transports=transport) as owner,
        kvlink.Worker(pool, "reader", transports=transport) as reader,
    ):
        reader.pull(owner.offer("warm", [1]), [2]).wait()
        pull = reader.pull(owner.offer("r", [1], ready=0), [2], timeout_s=DEADLINE_S)
        after_a_moment(interrupt)
        with pytest.raises(Interrupted):
            pull.wait()
        assert not pull.done()
        owner.set_ready("r", 1)
        assert pull.wait()


@pytest.mark.parametrize("timeout_s", [None, DEADLINE_S * 2])
def test_a_handler_runs_while_a_pull_is_waited_for(
    timeout_s: float | None, after_a_moment: Callable[[Handler], None]
) -> None:
    pool = kvlink.BlockPool.allocate(LAYOUT)
    with (
        kvlink.Worker(pool, "owner", transports="tcp") as owner,
        kvlink.Worker(pool, "reader", transports="tcp") as reader,
    ):
        pull = reader.pull(owner.offer("r", [1], ready=0), [2], timeout_s=DEADLINE_S)
        after_a_moment(lambda number, frame: owner.set_ready("r", 1))
        assert pull.wait(timeout_s), "the handler, which lets the pull end, came after the deadline"
