# SPDX-License-Identifier: Apache-2.0
"""The clocks of the stores: etcd's history and leases, and the loop's time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest
from control.cards import make_card, make_offer
from control.etcd_cluster import EtcdCluster
from control.fake_etcd import FakeEtcd
from virtual_time import run, virtual
from waiting import until

from kvlink.control import Claim, Limits
from kvlink.control.refusal import Reason, RefusedError
from kvlink.control.rpc.channel import Channel
from kvlink.coordinator.store import Store
from kvlink.coordinator.store.etcd import EtcdStore, api
from kvlink.coordinator.store.etcd.api import Etcd
from kvlink.coordinator.store.etcd.history import History
from kvlink.coordinator.store.etcd.membership import MAX_TRIES
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.types import Joined, WorkerChange
from kvlink.v1 import etcd_pb2 as pb

MakeStore = Callable[[], EtcdStore]


@pytest.fixture
async def make_store(fake_etcd: FakeEtcd) -> AsyncIterator[MakeStore]:
    made: list[EtcdStore] = []

    def make() -> EtcdStore:
        made.append(EtcdStore("etcd://127.0.0.1:1/fleet", clock=lambda: 0.0, trust=fake_etcd))
        return made[-1]

    yield make
    for store in made:
        await store.close()


@pytest.fixture
async def store(make_store: MakeStore) -> EtcdStore:
    store = make_store()
    await store.start()
    await store.join(make_card(), rejoin=False)
    for name in ("a", "b", "c"):
        await store.offer(make_offer(name))
    return store


def header(revision: int, cluster_id: int = 1) -> pb.ResponseHeader:
    return pb.ResponseHeader(revision=revision, cluster_id=cluster_id)


class Breaks(History):
    def __init__(self) -> None:
        super().__init__()
        self.why: list[str] = []
        self.on_break = self.why.append


def test_answers_of_one_history_may_overtake_each_other() -> None:
    history = Breaks()
    first, second = history.mark(), history.mark()
    history.note(header(8), second)
    history.note(header(7), first)
    history.note(header(8), history.mark())
    assert history.why == []


def test_a_revision_that_goes_back_is_another_history() -> None:
    history = Breaks()
    history.note(header(8), history.mark())
    under_way = [history.mark(), history.mark()]
    for began in under_way:
        history.note(header(3), began)
    assert history.why == ["revision 3 after 8"], "said once, whatever was under way"
    history.note(header(3), history.mark())
    history.note(header(9), history.mark())
    assert len(history.why) == 1


def test_what_a_watch_brought_does_not_go_back_either() -> None:
    history = Breaks()
    history.reached(8)
    history.note(header(3), history.mark())
    assert history.why == ["revision 3 after 8"]


def test_another_cluster_is_another_history_whatever_its_revision() -> None:
    history = Breaks()
    history.note_watch(header(5, cluster_id=0))
    history.note(header(8), history.mark())
    history.note_watch(header(2))
    assert history.why == [], "the member of a watch may lag behind"
    history.note_watch(header(9, cluster_id=0xA))
    history.note(header(9, cluster_id=0xA), history.mark())
    assert history.why == ["cluster id a instead of 1"]


def test_a_break_that_shows_in_the_contents_is_told_once() -> None:
    history = Breaks()
    history.note(header(8), history.mark())
    history.note_break("other contents")
    history.note(header(3), history.mark())
    assert history.why == ["other contents"]


async def joins_and_offers_again(store: EtcdStore, name: str) -> None:
    """As a session does that is told to."""
    while not await store.beat("prefill", 1):
        assert await store.join(make_card(), rejoin=True) == 1
    await store.offer(make_offer(name))
    assert await store.claim(Claim(name)) == [make_offer(name).ticket]


async def test_after_a_wipe_workers_join_and_offer_again(store: EtcdStore, fake_etcd: FakeEtcd) -> None:
    fake_etcd.wipe()
    await joins_and_offers_again(store, "a")
    assert [card.worker_id for card in await store.workers()] == ["prefill"]
    assert (await store.status()).tickets == 0
    fake_etcd.calls.clear()
    await joins_and_offers_again(store, "d")
    assert fake_etcd.calls.count("Txn") == 2, "one for the offer and one for the claim: nothing spins"


async def test_a_wipe_that_nobody_asked_through_is_noticed(store: EtcdStore, fake_etcd: FakeEtcd) -> None:
    feed = await store.watch()
    await anext(feed)
    fake_etcd.wipe()
    assert await anext(feed) == [WorkerChange(Joined.DOWN, make_card())]


async def test_a_wiped_etcd_that_has_overtaken_the_mirror_is_noticed(
    store: EtcdStore, fake_etcd: FakeEtcd
) -> None:
    fake_etcd.wipe()
    for number in range(50):
        fake_etcd.put((b"/another/%d" % number, b""))
    await joins_and_offers_again(store, "a")
    with pytest.raises(RefusedError) as gone:
        await store.claim(Claim("b"))
    assert gone.value.reason is Reason.UNKNOWN


async def test_a_restored_etcd_that_has_overtaken_the_mirror_is_noticed(
    store: EtcdStore, fake_etcd: FakeEtcd, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = fake_etcd.snapshot()
    await store.claim(Claim("a"))
    fake_etcd.restore(snapshot)
    for _ in range(5):
        fake_etcd.put((store._sync._layout.pulse, b"another history"))
    await until(lambda: "has other contents" in caplog.text)
    await until(lambda: store._mirror.num_free == 3)


async def test_a_snapshot_brings_back_what_it_holds(store: EtcdStore, fake_etcd: FakeEtcd) -> None:
    snapshot = fake_etcd.snapshot()
    for name in ("d", "e"):
        await store.offer(make_offer(name))
    feed = await store.watch()
    await anext(feed)
    fake_etcd.restore(snapshot)
    assert await store.beat("prefill", 1)
    await store.offer(make_offer("e"))
    for name in ("a", "e"):
        assert await store.claim(Claim(name, 30.0)) == [make_offer(name).ticket]
    with pytest.raises(RefusedError, match="no worker offered it"):
        await store.claim(Claim("d"))
    assert len(feed) == 0, "the worker is in the snapshot: it was never gone"


async def test_tickets_of_another_history_are_told_apart_by_what_they_hold(
    store: EtcdStore, fake_etcd: FakeEtcd
) -> None:
    snapshot = fake_etcd.snapshot()
    await store.offer(make_offer("d", rank=0, of=1))
    fake_etcd.restore(snapshot)
    await store.beat("prefill", 1)
    await store.offer(make_offer("d", ttl_s=31.0)._replace(ticket=b"another"))
    assert await store.claim(Claim("d", 30.0)) == [b"another"]


async def test_a_claim_that_waits_gets_what_is_offered_after_a_wipe(
    store: EtcdStore, fake_etcd: FakeEtcd
) -> None:
    await store.offer(make_offer("d", rank=0, of=2))
    waiting = store.claim(Claim("d", 1e9))
    fake_etcd.wipe()
    await joins_and_offers_again(store, "a")
    await asyncio.gather(*(store.offer(make_offer("d", rank=rank, of=2)) for rank in (0, 1)))
    assert await waiting == [make_offer("d", rank=rank, of=2).ticket for rank in (0, 1)]


async def test_a_card_that_the_mirror_missed_is_written_again(store: EtcdStore) -> None:
    del store._mirror.members["prefill"]
    assert await store.join(make_card(), rejoin=True) == 1
    await until(lambda: store._mirror.members)


async def test_a_mirror_that_stays_wrong_ends_in_a_refusal(store: EtcdStore, fake_etcd: FakeEtcd) -> None:
    fake_etcd._revoke(pb.LeaseRevokeRequest(ID=store._mirror.members["prefill"].lease))
    await until(lambda: not store._mirror.members)
    await store.join(make_card(), rejoin=True)
    wrong = store._mirror.members["prefill"]._replace(lease=999)
    store._mirror.members["prefill"] = wrong
    fake_etcd.calls.clear()
    with pytest.raises(RefusedError, match=r"request 'x': .* retry") as refused:
        await store.offer(make_offer("x"))
    assert refused.value.reason is Reason.NOT_READY
    assert len(fake_etcd.calls) == 2 * MAX_TRIES


async def test_a_claim_by_a_mirror_that_stays_wrong_ends_in_a_refusal(store: EtcdStore) -> None:
    store._mirror.requests["a"].tickets[0].revision = 999
    with pytest.raises(RefusedError, match=r"request 'a': .* retry") as refused:
        await store.claim(Claim("a"))
    assert refused.value.reason is Reason.NOT_READY


async def test_a_ticket_that_another_coordinator_writes_meanwhile_is_written_once(
    store: EtcdStore, fake_etcd: FakeEtcd, make_store: MakeStore
) -> None:
    other = make_store()
    await other.start()
    fake_etcd.calls.clear()
    await asyncio.gather(store.offer(make_offer("d")), other.offer(make_offer("d")))
    assert fake_etcd.calls.count("Txn") == 2
    assert await other.claim(Claim("d", 30.0)) == [make_offer("d").ticket]


async def test_changes_that_were_compacted_are_listed(store: EtcdStore, fake_etcd: FakeEtcd) -> None:
    fake_etcd.is_mute = True
    fake_etcd._revoke(pb.LeaseRevokeRequest(ID=store._mirror.members["prefill"].lease))
    fake_etcd.put((b"/another", b""))
    fake_etcd._compact(pb.CompactionRequest(revision=fake_etcd.data.revision))
    fake_etcd.is_mute = False
    fake_etcd.calls.clear()
    fake_etcd.cut()
    await until(lambda: not store._mirror.members or fake_etcd.calls.count("Watch") > 3)
    assert not store._mirror.members


async def test_one_that_only_watches_notices(
    store: EtcdStore, fake_etcd: FakeEtcd, make_store: MakeStore
) -> None:
    idle = make_store()
    await idle.start()
    for name in ("d", "e", "f"):
        await store.offer(make_offer(name))
    await until(lambda: idle._mirror.num_free == 6)
    # Above what a call of `idle` has seen, below what its watch has.
    num_written = fake_etcd.data.revision - 3
    fake_etcd.wipe()
    for number in range(num_written):
        fake_etcd.put((b"/another/%d" % number, b""))
    await until(lambda: not idle._mirror.members)


async def test_one_that_only_listed_lists_again(
    fake_etcd: FakeEtcd, store: EtcdStore, make_store: MakeStore
) -> None:
    idle = make_store()
    await idle.start()
    fake_etcd.wipe()
    for number in range(50):
        fake_etcd.put((b"/another/%d" % number, b""))
    await until(lambda: not idle._mirror.members)


async def test_a_revision_that_will_not_come_is_not_awaited(
    store: EtcdStore, fake_etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlink.coordinator.store.etcd.sync._STALE_S", 1e6)
    waiting = asyncio.create_task(store._sync.reached(1_000))
    await asyncio.sleep(0)
    fake_etcd.wipe()
    await waiting


def over_fake_etcd() -> Store:
    return EtcdStore("etcd://127.0.0.1:1/fleet", lease_s=7_200.0, trust=FakeEtcd())


@virtual
async def test_a_watch_that_brings_nothing_is_begun_again() -> None:
    fake_etcd = FakeEtcd()
    store = EtcdStore("etcd://127.0.0.1:1/fleet", trust=fake_etcd)
    await store.start()
    feed = await store.watch()  # for its sake
    fake_etcd.is_mute = True
    fake_etcd.calls.clear()
    await asyncio.sleep(10.0)
    assert 2 <= fake_etcd.calls.count("Watch") <= 8
    feed.close()
    await store.close()


@pytest.mark.parametrize("make", [lambda: MemoryStore(7_200.0), over_fake_etcd], ids=["memory", "fake"])
@virtual
async def test_a_ticket_expires_when_the_loop_says_so(make: Callable[[], Store]) -> None:
    store = make()
    await store.start()
    await store.join(make_card(), rejoin=False)
    await store.offer(make_offer("r", ttl_s=3_600.0))
    await asyncio.sleep(3_599.0)
    assert (await store.status()).tickets == 1
    await asyncio.sleep(2.0)
    assert ((await store.status()).tickets, (await store.status()).expired) == (0, 1)
    await store.close()


NUM_LEASES = Limits().workers


class _Busy:
    """A member that takes 0.1 ms for each lease, and 5 ms to begin."""

    def __init__(self) -> None:
        self.num_calls = 0

    def open(self, method: object) -> _Busy:
        self.num_calls += 1
        self._leases: list[int] = []
        return self

    async def send(self, request: pb.LeaseKeepAliveRequest) -> None:
        self._leases.append(request.ID)

    async def finish(self) -> None:
        await asyncio.sleep(0.005)

    async def receive(self) -> pb.LeaseKeepAliveResponse | None:
        if not self._leases:
            return None
        await asyncio.sleep(0.0001)
        lease = self._leases.pop()
        return pb.LeaseKeepAliveResponse(ID=lease, TTL=0 if lease % 7 == 0 else 10)

    def leave(self) -> None:
        raise AssertionError("it was slow, and not away")

    def cancel(self) -> None:
        pass


def test_a_member_that_takes_a_second_for_all_of_them_renews_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = _Busy()
    monkeypatch.setattr(api, "Channel", lambda *_, **__: cast(Channel, busy))

    async def main() -> set[int]:
        return await Etcd("busy:2379").keep_alive(range(1, NUM_LEASES + 1))

    assert run(main) == {lease for lease in range(1, NUM_LEASES + 1) if lease % 7}
    assert busy.num_calls == 20


async def test_ten_thousand_leases_of_a_real_etcd(etcd: EtcdCluster) -> None:
    client = Etcd(etcd.addresses)
    leases: set[int] = set()
    for _ in range(NUM_LEASES // 100):
        leases.update(await asyncio.gather(*(client.grant(600) for _ in range(100))))
    for _ in range(3):
        assert await client.keep_alive(leases) == leases
    await client.close()
