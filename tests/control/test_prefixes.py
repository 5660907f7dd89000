# SPDX-License-Identifier: Apache-2.0
"""Prefixes: their directory over the wire, and what publishes them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from control.cards import make_card
from control.certificates import Pki
from coordinator.chains import prefix, query, shown
from virtual_time import run, virtual
from waiting import until

from kvlink.control import CoordinatorClient
from kvlink.control.codec import CoordinatorCalls
from kvlink.control.limits import MAX_PREFIXES, Limits
from kvlink.control.prefix_publisher import PrefixPublisher
from kvlink.control.refusal import NotJoined, Reason, RefusedError
from kvlink.control.security import Role
from kvlink.control.security.callers import Caller, set_caller
from kvlink.control.values import CoordinatorStatus, Prefix, PrefixChanges, WorkerEpoch
from kvlink.coordinator import Coordinator
from kvlink.coordinator.prefix_service import PrefixService
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.coordinator.tenant_stores import TenantStores, stores
from kvlink.errors import ConfigError, CoordinatorError, CoordinatorUnavailable, UnknownRequest
from kvlink.types import HostIdentity


def of(worker_id: str, *prefixes: Prefix, epoch: int = 1, withdrawn: tuple[str, ...] = ()) -> PrefixChanges:
    return PrefixChanges(worker_id, epoch, prefixes, withdrawn)


async def test_a_prefix_goes_from_one_client_to_another(client: CoordinatorClient) -> None:
    await client.join(make_card())
    assert await client.find_prefix(query("abc")) == []
    directory_id = await client.publish_prefixes(of("prefill", prefix("ab"), prefix("abcd")))
    assert shown(await client.find_prefix(query("abcx"))) == [(3, "abcd")]
    assert await client.publish_prefixes(of("prefill", withdrawn=("abcd",))) == directory_id != 0
    assert shown(await client.find_prefix(query("abcx"))) == [(2, "ab")]
    status = await client.status()
    assert (status.prefixes, status.published_prefixes, status.prefix_lookups, status.prefix_hits) == (
        1,
        2,
        3,
        2,
    )
    assert 0 < status.prefix_bytes < 5_000


async def test_only_a_joined_worker_publishes(client: CoordinatorClient) -> None:
    with pytest.raises(NotJoined, match="'prefill' is not joined"):
        await client.publish_prefixes(of("prefill", prefix("ab")))
    await client.join(make_card())
    with pytest.raises(UnknownRequest, match="for epoch 2, and epoch 1 is running"):
        await client.publish_prefixes(of("prefill", prefix("ab"), epoch=2))
    assert await client.publish_prefixes(of("prefill")) == await client.publish_prefixes(of("prefill"))


async def test_a_prefix_ends_with_its_workers_membership(client: CoordinatorClient) -> None:
    for worker_id, prompt in (("leaves", "a"), ("restarts", "b"), ("stays", "c")):
        await client.join(make_card(worker_id))
        await client.publish_prefixes(of(worker_id, prefix(prompt)))

    async def found() -> str:
        return "".join([prompt for prompt in "abc" if await client.find_prefix(query(prompt))])

    assert await found() == "abc"
    await client.leave("leaves", 1)
    await until(lambda: _equals(found, "bc"))
    await client.join(make_card("restarts", epoch=9, process=9))
    await until(lambda: _equals(found, "c"))
    await client.publish_prefixes(of("restarts", prefix("b"), epoch=9))
    assert await found() == "bc"


async def _equals(found: object, expected: str) -> bool:
    return await found() == expected  # type: ignore[operator,no-any-return]


async def test_servers_on_the_readers_host_come_first(client: CoordinatorClient) -> None:
    for worker_id, boot_id in (("far", "x"), ("far-2", "x"), ("near", "y"), ("reader", "y")):
        host = HostIdentity(boot_id, 1, 2, 3, 4)
        await client.join(replace(make_card(worker_id, agent=f"127.0.0.1:{len(worker_id)}"), host=host))
        await client.publish_prefixes(of(worker_id, prefix("ab", worker_id)))
    for _ in range(3):
        (best,) = await client.find_prefix(query("ab", worker_id="reader"))
        assert best.tickets[0] == b"ticket of ab near rank 0"
    names = [each.tickets[0] for each in await client.find_prefix(query("ab", most=9, worker_id="stranger"))]
    assert len(names) == 4
    await client.publish_prefixes(of("far-2", withdrawn=("far-2",)))
    for _ in range(3):
        (best,) = await client.find_prefix(query("ab", worker_id="reader"))
        assert best.tickets[0] == b"ticket of ab near rank 0", "one of two"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"keys": b""}, "number of keys is 0"),
        ({"keys": bytes(9)}, "these 9 bytes are no multiple"),
        ({"keys": bytes(8 * 65_537)}, "number of keys.* is 65537"),
        ({"scope": bytes(15)}, "bytes of the scope is 15"),
        ({"tokens_per_key": 0}, "tokens_per_key"),
        ({"ticket": b""}, "bytes of the ticket is 0"),
        ({"ticket": bytes((4 << 20) + 1)}, "bytes of the ticket"),
        ({"rank": 2, "num_ranks": 2}, "rank 2 of 2"),
        ({"ttl_s": 86_401.0}, "ttl_s"),
        ({"request_id": ""}, "request_id has 0 bytes"),
    ],
)
async def test_what_exceeds_a_bound_is_refused(
    client: CoordinatorClient, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        await client.publish_prefixes(of("prefill", prefix("ab")._replace(**changes)))  # type: ignore[arg-type]


async def test_a_lookup_is_bounded(client: CoordinatorClient) -> None:
    with pytest.raises(ConfigError, match="most is 17"):
        await client.find_prefix(query("ab", most=17))
    many = [prefix("ab", str(each))._replace(keys=bytes(8 * 300)) for each in range(256)]
    with pytest.raises(ConfigError, match="number of keys of all prefixes"):
        await client.publish_prefixes(of("prefill", *many))


async def test_tenants_do_not_find_each_others_prefixes(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    security = pki.coordinator()
    coordinator = Coordinator(stores(lambda tenant: MemoryStore(), security), security=security)
    await coordinator.start()
    async with (
        CoordinatorClient(coordinator.address, security=pki.worker("acme")) as acme,
        CoordinatorClient(coordinator.address, security=pki.worker("other")) as other,
    ):
        for client, prompt in ((acme, "ab"), (other, "abc")):
            await client.join(make_card())
            await client.publish_prefixes(of("prefill", prefix(prompt)))
        assert shown(await acme.find_prefix(query("abc"))) == [(2, "ab")]
        assert shown(await other.find_prefix(query("abc"))) == [(3, "abc")]
        await acme.publish_prefixes(of("prefill", withdrawn=("abc",)))
        assert shown(await other.find_prefix(query("abc"))) == [(3, "abc")]
        await other.leave("prefill", 1)
        assert shown(await acme.find_prefix(query("abc"))) == [(2, "ab")]
        assert (await acme.status()).prefixes == 1
    assert (await coordinator.status()).published_prefixes == 2
    await coordinator.close()


class Bounded:
    """A service of several tenants whose time is a value."""

    def __init__(self, limits: Limits) -> None:
        self.now = 0.0
        self.service = PrefixService(TenantStores(lambda tenant: MemoryStore()), limits, lambda: self.now)

    async def publish(self, tenant: str, *prefixes: Prefix) -> None:
        set_caller(Caller(tenant))
        await self.service._store.join(make_card(), rejoin=False)
        await self.service.publish(of("prefill", *prefixes))

    async def found(self, tenant: str, prompts: str) -> str:
        set_caller(Caller(tenant))
        return "".join([each for each in prompts if await self.service.find(query(each))])

    async def counted(self) -> CoordinatorStatus:
        set_caller(Caller("*", Role.OBSERVER))
        return await self.service.counted(CoordinatorStatus())


async def test_the_oldest_prefix_of_the_largest_tenant_makes_room() -> None:
    bounded = Bounded(Limits(prefixes=6))
    await bounded.publish("small", prefix("a"), prefix("b"))
    for prompt in "abcdefgh":
        await bounded.publish("large", prefix(prompt))
    assert await bounded.found("small", "ab") == "ab"
    assert await bounded.found("large", "abcdefgh") == "efgh"
    status = await bounded.counted()
    assert (status.prefixes, status.evicted_prefixes, status.published_prefixes) == (6, 4, 10)
    set_caller(Caller("small"))
    status = await bounded.service.counted(CoordinatorStatus())
    assert (status.prefixes, status.evicted_prefixes, status.published_prefixes) == (2, 0, 2)
    await bounded.service.close()


async def test_others_have_their_turns_while_room_is_made() -> None:
    bounded = Bounded(Limits(prefix_bytes=1_200_000))
    await bounded.publish("acme", *(prefix("a", str(number)) for number in range(300)))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.create_task(others())
    await asyncio.sleep(0)
    await bounded.publish("acme", prefix("b")._replace(ticket=bytes(1_100_000)))
    beside.cancel()
    assert turns >= 1
    assert (await bounded.counted()).evicted_prefixes > 250
    await bounded.service.close()


async def test_a_tenants_worker_that_is_not_joined_does_not_publish() -> None:
    bounded = Bounded(Limits())
    set_caller(Caller("acme"))
    with pytest.raises(RefusedError, match="'prefill' is not joined"):
        await bounded.service.publish(of("prefill", prefix("a")))
    await bounded.service.close()


async def test_its_memory_is_bounded() -> None:
    bounded = Bounded(Limits(prefix_bytes=100_000))
    for number in range(50):
        await bounded.publish("acme", prefix("a" * 20, str(number))._replace(ticket=bytes(2_000)))
    assert 80_000 < (await bounded.counted()).prefix_bytes <= 100_000
    await bounded.publish("acme", prefix("x")._replace(ticket=bytes(200_000)))
    assert (await bounded.counted()).prefixes == 0, "what is larger than the directory is not kept"
    await bounded.service.close()


async def test_a_prefix_expires_by_the_coordinators_clock() -> None:
    bounded = Bounded(Limits())
    await bounded.publish("acme", prefix("a", ttl_s=5.0), prefix("b", ttl_s=50.0))
    bounded.now = 5.0
    assert await bounded.found("acme", "ab") == "b"
    bounded.now = 50.0
    status = await bounded.counted()
    assert (status.prefixes, status.expired_prefixes, status.prefix_bytes) == (0, 2, 0)
    await bounded.service.close()


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


@virtual
async def test_a_worker_that_leaves_while_it_publishes_leaves_nothing() -> None:
    store = MemoryStore()
    await store.start()
    service = PrefixService(store)
    await store.join(make_card("gone"), rejoin=False)
    many = tuple(prefix("a", str(number)) for number in range(1_000))
    publishing = asyncio.ensure_future(service.publish(PrefixChanges("gone", 1, many)))
    await asyncio.sleep(0)  # for the first of them
    await store.leave("gone", 1)
    with pytest.raises(RefusedError, match="'gone' is not joined"):
        await publishing
    await asyncio.sleep(2.0)
    assert not await service.find(query("a"))
    await service.close()
    await store.close()


@virtual
async def test_a_watch_that_fell_behind_is_begun_again() -> None:
    store = MemoryStore()
    await store.start()
    service = PrefixService(store)
    for worker_id in ("gone", "stays"):
        await store.join(make_card(worker_id), rejoin=False)
        await service.publish(PrefixChanges(worker_id, 1, (prefix(worker_id[0]),)))
    await asyncio.sleep(0.01)
    (feed,) = store._watchers
    feed.close(RefusedError(Reason.TOO_MANY, "fell behind"))
    await store.leave("gone", 1)  # nobody watches
    assert shown(await service.find(query("g")))
    await asyncio.sleep(2.0)
    assert not await service.find(query("g"))
    assert shown(await service.find(query("s"))) == [(1, "s")]
    await service.close()
    await store.close()
