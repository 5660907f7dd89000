# SPDX-License-Identifier: Apache-2.0
"""A worker's prefixes stay in the directory for as long as their leases last, whatever happens to the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable

import pytest
from control.cards import make_card
from coordinator.chains import prefix, query, shown
from virtual_time import run

from kvlink.control.codec import CoordinatorCalls
from kvlink.control.limits import MAX_PREFIXES
from kvlink.control.prefix_publisher import PrefixPublisher
from kvlink.control.refusal import Reason, Refused
from kvlink.control.values import Prefix, PrefixChanges, WorkerEpoch
from kvlink.coordinator.prefix_service import PrefixService
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.errors import CoordinatorError, CoordinatorUnavailable

_CODEC = CoordinatorCalls.PUBLISH_PREFIXES.request


class Directory:
    """In place of a client. It holds what a coordinator would, without its time limits."""

    def __init__(self) -> None:
        self.directory_id = 7
        self.held: dict[str, Prefix] = {}
        self.calls: list[tuple[float, int, int]] = []
        self.error: Exception | None = None

    async def publish_prefixes(self, changes: PrefixChanges, timeout_s: float | None = None) -> int:
        await asyncio.sleep(0.01)
        changes = _CODEC.decode(_CODEC.encode(changes))
        self.calls.append((asyncio.get_running_loop().time(), len(changes.prefixes), len(changes.withdrawn)))
        if self.error is not None:
            raise self.error
        for request_id in changes.withdrawn:
            self.held.pop(request_id, None)
        self.held.update((each.request_id, each) for each in changes.prefixes)
        return self.directory_id

    def restart(self) -> None:
        self.directory_id += 1
        self.held.clear()


class Worker:
    def __init__(self) -> None:
        self.directory = Directory()
        self.publisher = PrefixPublisher(self.directory, lambda: WorkerEpoch("prefill", 1))  # type: ignore[arg-type]
        self.ended: set[str] = set()

    def publish(self, name: str, ttl_s: float = 600.0) -> None:
        self.publisher.publish(prefix(name, ttl_s=ttl_s), lambda: name not in self.ended)


def simulate(scene: Callable[[Worker], Awaitable[None]]) -> None:
    async def main() -> None:
        worker = Worker()
        task = asyncio.ensure_future(worker.publisher.run())
        await asyncio.sleep(0)
        await scene(worker)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    run(main)


def test_nothing_is_asked_while_nothing_is_published() -> None:
    async def scene(worker: Worker) -> None:
        await asyncio.sleep(0)
        worker.publisher.withdraw("unknown")
        assert worker.directory.calls == []
        worker.publish("a")
        await asyncio.sleep(1)
        worker.publisher.withdraw("a")
        await asyncio.sleep(100)
        assert worker.directory.held == {}
        assert len(worker.directory.calls) == 2

    simulate(scene)


def test_it_is_published_at_once_and_again_in_time() -> None:
    async def scene(worker: Worker) -> None:
        worker.publish("a", ttl_s=60.0)
        await asyncio.sleep(0.5)
        assert list(worker.directory.held) == ["a"]
        await asyncio.sleep(179.5)
        sent = [at for at, number, _ in worker.directory.calls if number]
        assert len(sent) == 6
        assert max(later - at for at, later in itertools.pairwise(sent)) < 33.0
        asked = [at for at, _, _ in worker.directory.calls]
        assert max(later - at for at, later in itertools.pairwise(asked)) < 13.0

    simulate(scene)


def test_a_prefix_is_withdrawn_soon_after_its_lease_has_ended() -> None:
    async def scene(worker: Worker) -> None:
        for name in "abc":
            worker.publish(name)
        await asyncio.sleep(1)
        worker.ended.add("b")
        await asyncio.sleep(2.5)
        assert list(worker.directory.held) == ["a", "c"]
        assert len(worker.publisher) == 2
        worker.ended.discard("b")
        worker.publish("b")
        await asyncio.sleep(0.5)
        assert list(worker.directory.held) == ["a", "c", "b"]
        worker.publisher.withdraw("a")
        worker.publish("a")
        await asyncio.sleep(0.5)
        assert worker.directory.calls[-1][1:] == (1, 0), "it is published, and not withdrawn"

    simulate(scene)


def test_a_lost_directory_gets_all_prefixes_again() -> None:
    async def scene(worker: Worker) -> None:
        for name in "abc":
            worker.publish(name)
        await asyncio.sleep(1)
        worker.directory.restart()
        await asyncio.sleep(13)
        assert sorted(worker.directory.held) == ["a", "b", "c"]
        worker.directory.restart()
        worker.publish("d")
        await asyncio.sleep(0.5)
        assert sorted(worker.directory.held) == ["a", "b", "c", "d"]
        assert sum(number for _, number, _ in worker.directory.calls) == 3 + 3 + 1 + 3

    simulate(scene)


@pytest.mark.parametrize("error", [CoordinatorUnavailable("down"), CoordinatorError("no such method")])
def test_failures_are_logged_once_and_tried_less_and_less_often(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    async def scene(worker: Worker) -> None:
        worker.directory.error = error
        worker.publish("a")
        await asyncio.sleep(300)
        assert len([line for line in caplog.messages if "prefixes are not published for now" in line]) == 1
        assert 10 < len(worker.directory.calls) < 20
        worker.directory.error = None
        await asyncio.sleep(31)
        assert list(worker.directory.held) == ["a"]

    with caplog.at_level(logging.WARNING):
        simulate(scene)


def test_many_are_sent_in_as_many_calls_as_their_bounds_need() -> None:
    async def scene(worker: Worker) -> None:
        for number in range(2 * MAX_PREFIXES + 1):
            worker.publish(f"p{number}")
        await asyncio.sleep(0.5)
        assert [number for _, number, _ in worker.directory.calls] == [MAX_PREFIXES, MAX_PREFIXES, 1]
        large = prefix("large")._replace(ticket=bytes(3 << 20))
        for each in (large, prefix("x"), prefix("y")):
            worker.publisher.publish(each, lambda: True)
        worker.publisher.withdraw("p0")
        await asyncio.sleep(0.5)
        assert [call[1:] for call in worker.directory.calls[3:]] == [(1, 0), (2, 1)]
        assert len(worker.directory.held) == len(worker.publisher) == 2 * MAX_PREFIXES + 3

    simulate(scene)


def test_what_is_published_while_a_call_runs_is_sent_by_the_next() -> None:
    async def scene(worker: Worker) -> None:
        worker.publish("a")
        await asyncio.sleep(0.005)
        newer = prefix("another prompt", "a")
        worker.publisher.publish(newer, lambda: True)
        worker.publisher.publish(prefix("b"), lambda: True)
        worker.publisher.withdraw("b")
        await asyncio.sleep(0.5)
        assert worker.directory.held == {"a": newer}

    simulate(scene)


def test_a_watch_that_fell_behind_is_begun_again() -> None:
    async def main() -> None:
        store = MemoryStore()
        await store.start()
        service = PrefixService(store)
        for worker_id in ("gone", "stays"):
            await store.join(make_card(worker_id), rejoin=False)
            await service.publish(PrefixChanges(worker_id, 1, (prefix(worker_id[0]),)))
        await asyncio.sleep(0.01)
        (feed,) = store._watchers
        feed.close(Refused(Reason.TOO_MANY, "fell behind"))
        await store.leave("gone", 1)  # nobody watches
        assert shown(await service.find(query("g")))
        await asyncio.sleep(2.0)
        assert not await service.find(query("g"))
        assert shown(await service.find(query("s"))) == [(1, "s")]
        await service.close()
        await store.close()

    run(main)
