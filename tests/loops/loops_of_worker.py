# SPDX-License-Identifier: Apache-2.0
"""The loops of kvlink/worker, of kvlink/transfer and of the control thread. They run in real threads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from loops.rows import FailingOnce, Unexpected, failing, passes, scene
from waiting import eventually, until
from worker.soft_server import LAYOUT

from kvlink import BlockPool, Worker, WorkerConfig
from kvlink.control.prefix_publisher import PrefixPublisher
from kvlink.coordinator import Coordinator
from kvlink.errors import PeerUnreachable, TransferTimeout
from kvlink.runtime import background
from kvlink.runtime.background import ControlThread
from kvlink.transfer.completion import LoopWaiter, QueueReader
from kvlink.transfer.peers import Peers
from kvlink.transfer.pulls import Pulls, _Run
from kvlink.transfer.shared_connect import SharedConnects
from kvlink.worker.membership import WorkerMembership
from kvlink.worker.unread import Releaser

DIGESTS = [bytes([number]) * 16 for number in range(2)]


@contextmanager
def coordinator() -> Iterator[Coordinator]:
    control, serving = ControlThread.shared(), Coordinator()
    control.run(serving.start())
    yield serving
    control.run(serving.close())


@contextmanager
def workers(serving: Coordinator | None = None) -> Iterator[tuple[Worker, Worker]]:
    layout = replace(LAYOUT, model="llama")
    config = WorkerConfig(transports="loopback", coordinator=serving.address if serving else "")
    with (
        Worker(BlockPool.allocate(layout), "owner", config=config) as owner,
        Worker(BlockPool.allocate(layout), "reader", config=config) as reader,
    ):
        yield owner, reader


def status(serving: Coordinator) -> Any:
    return ControlThread.shared().run(serving.status())


def publish(worker: Worker, name: str, block: int) -> None:
    worker.publish_prefix(worker.offer_soft(name, [block], digests=DIGESTS[block : block + 1]))


@scene("prefix publisher")
def a_publisher_of_prefixes() -> None:
    with coordinator() as serving, workers(serving) as (owner, _), failing(PrefixPublisher, "step"):
        publish(owner, "a", 0)
        eventually(lambda: status(serving).prefixes == 1)


@scene("published prefix")
def a_prefix_that_is_published() -> None:
    with (
        coordinator() as serving,
        workers(serving) as (owner, _),
        failing(WorkerMembership, "publish_prefix"),
    ):
        publish(owner, "a", 0)
        publish(owner, "b", 1)
        eventually(lambda: status(serving).prefixes == 1)


@scene("worker job")
def a_job_of_a_worker() -> None:
    with coordinator() as serving, workers(serving) as (owner, reader):
        with failing(WorkerMembership, "publish"):
            owner.offer("a", [0], publish=True)
            owner.offer("b", [1], publish=True)
            eventually(lambda: status(serving).tickets == 1)
        with failing(Releaser, "_release_by_agent"):
            reader.release(owner.offer("c", [2]))
            reader.release(owner.offer("d", [3]))
            eventually(lambda: [event.request_id for event in owner.events()] == ["d"])


@scene("ended offer")
def an_offer_that_ended() -> None:
    with coordinator() as serving, workers(serving) as (owner, _):
        for name in ("a", "b"):
            owner.offer(name, [0], publish=True)
        eventually(lambda: status(serving).tickets == 2)
        with failing(WorkerMembership, "forget"):
            for name in ("a", "b"):
                owner.abort(name)
            assert len(owner.events()) == 2
            session = owner._membership._session
            assert session is not None
            eventually(lambda: session._offers.keys() == {"a"})


@scene("drain")
def a_drain() -> None:
    with coordinator() as serving, workers(serving) as (owner, _), failing(WorkerMembership, "begin_drain"):
        assert owner.drain(0)
        assert owner.drain(0)
        eventually(lambda: status(serving).draining == 1)


@scene("drain notice")
def a_notice_of_a_drain() -> None:
    with coordinator() as serving, workers(serving) as (owner, reader), failing(WorkerMembership, "_tell"):
        owner.drain(0)
        reader.drain(0)
        eventually(lambda: status(serving).draining == 1)


@scene("pull start")
def the_start_of_a_pull() -> None:
    with workers() as (owner, reader), failing(_Run, "turns_from"):
        tickets = [owner.offer(name, [1]) for name in ("a", "b")]
        owner.close()
        for ticket in tickets:
            with pytest.raises(PeerUnreachable):
                reader.pull(ticket, [1]).wait(20)


@scene("pull action")
def actions_of_pulls() -> None:
    with workers() as (owner, reader), failing(Pulls, "_do"):
        with pytest.raises(TransferTimeout):
            reader.pull(owner.offer("a", [1]), [1], timeout_s=0.1).wait()
        assert reader.pull(owner.offer("b", [1]), [1]).wait(20)


@scene("lost settles")
def settles_that_a_broken_connection_lost() -> None:
    with workers() as (owner, reader), failing(Pulls, "_settle_lost"):
        peer = reader.connect(owner.offer("a", [1]))
        assert peer is not None
        queue = reader._pulls._reader
        for _ in range(2):
            reader._control.on_loop("lost settles", queue._on_ready, [peer.connection.token])
            reader._control.run(asyncio.sleep(0))  # until it has run
        assert reader.pull(owner.offer("b", [1]), [1]).wait(20)


@scene("completions")
def completions() -> None:
    async def pulls() -> None:
        waiter = LoopWaiter.of_running_loop()
        for name in ("a", "b"):
            running = asyncio.ensure_future(reader.pull(owner.offer(name, [1], ready=0), [1]))
            await until(lambda: waiter._waiting)
            owner.set_ready(name, 1)
            await running

    with workers() as (owner, reader), failing(LoopWaiter, "_drain"):
        asyncio.run(pulls())


@scene("engine events")
def events_of_an_engine() -> None:
    async def events() -> None:
        on_ready = FailingOnce()
        reader = QueueReader(on_ready)
        owner._engine.core.watch_ended(reader.queue)
        for number in (1, 2):
            owner.offer(f"r{number}", [0])
            owner.abort(f"r{number}")
            await until(lambda at=number: on_ready.num_calls >= at)
            owner.events()
        owner._engine.stop_notifying(reader.queue)
        reader.close()

    with workers() as (owner, _):
        asyncio.run(events())


@scene("connect ended")
async def connects() -> None:
    async def attempt(key: object, agent: str, timeout_s: float, fresh: bool) -> None:
        await passes(0.1)

    clock = asyncio.get_running_loop().time
    connecting = SharedConnects(attempt, clock)
    with failing(SharedConnects, "_ended"):
        for _ in range(2):
            assert await connecting.connect(("owner", 1), "agent", clock() + 5.0) is None
    await passes()
    assert connecting._running == {}


class _Connection:
    """Stands for a connection on which pulls run for two seconds. The first question fails."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.closed = False
        self._clock = asyncio.get_running_loop().time
        self._idle_at = self._clock() + 2.0

    @property
    def idle(self) -> bool:
        if self.fails:
            self.fails = False
            raise Unexpected
        return self._clock() >= self._idle_at

    def close(self) -> None:
        self.closed = True


@scene("better path")
async def a_look_for_a_better_path() -> None:
    opens = FailingOnce()

    class Looking(Peers):
        async def _open(self, *_: Any, **__: Any) -> Any:
            opens()
            return None

    peers = Looking(cast(Any, SimpleNamespace(path_stats=SimpleNamespace())), cast(Any, None))
    key = ("owner", 7)
    peers._peers[key] = cast(Any, SimpleNamespace(wants_better=True))
    peers._improve_beside(key, "agent")
    for _ in range(3):
        await passes(20.0)
    assert opens.calls
    peers._peers[key] = cast(Any, SimpleNamespace(wants_better=False))
    await passes(400.0)
    assert peers._improving == {}


@scene("retired connection")
async def a_retired_connection() -> None:
    peers = Peers(cast(Any, SimpleNamespace(path_stats=SimpleNamespace())), cast(Any, None))
    connections = [_Connection(fails=True), _Connection(fails=False)]
    for connection in connections:
        peers._retire(cast(Any, SimpleNamespace(connection=connection)))
    await passes()
    assert [connection.closed for connection in connections] == [True, True]
    assert peers._retiring == {}


@scene("connection retired")
async def the_end_of_a_retired_connection() -> None:
    class Retiring(dict[Any, Any]):
        def pop(self, task: Any) -> None:  # type: ignore[override]
            on_pop(task)
            super().pop(task)

    on_pop = FailingOnce()
    peers = Peers(cast(Any, SimpleNamespace(path_stats=SimpleNamespace())), cast(Any, None))
    peers._retiring = Retiring()
    for _ in range(2):
        peers._retire(cast(Any, SimpleNamespace(connection=_Connection(fails=False))))
    await passes()
    assert len(peers._retiring) == 1


async def _nothing() -> int:
    return 7


@scene("control thread")
def a_control_thread() -> None:
    with failing(background, "_run"):
        thread = ControlThread("kvlink-test")
        assert thread.run(_nothing()) == 7
    thread.close()
    assert not thread._thread.is_alive()


@scene("event loop")
def an_event_loop() -> None:
    with failing(asyncio.BaseEventLoop, "run_forever"):
        thread = ControlThread("kvlink-test")
        assert thread.run(_nothing()) == 7
    thread.close()
    assert not thread._thread.is_alive()


@scene("end of an offer")
def ends_of_offers() -> None:
    ended: list[str] = []
    with workers() as (owner, _):
        owner.offers.on_ended = told = FailingOnce()
        for number, name in enumerate(("a", "b")):
            owner.offer(name, [number])
            owner.abort(name)
        eventually(lambda: ended.extend(event.request_id for event in owner.events()) or len(ended) == 2)
        assert set(ended) == {"a", "b"}
        assert len(told.calls) == 1
