# SPDX-License-Identifier: Apache-2.0
"""Tenants: what each may see and do, their file, and their shares."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from control.cards import make_card, make_offer
from control.certificates import HOSTS, Pki, secured
from hypothesis import given
from hypothesis import strategies as st
from transports.pools import wide

from kvlink import Worker
from kvlink.control import AgentClient, CoordinatorClient, Security, Session, SettleOrder, WorkerAgent
from kvlink.control.codec import CoordinatorCalls, Method
from kvlink.control.limits import MAX_CONNECTS, MAX_CONNECTS_OF_ONE, MAX_HELLOS
from kvlink.control.overview import Beat, WorkerReport
from kvlink.control.refusal import Overloaded, RefusedError
from kvlink.control.rpc.peer_address import caller_number, serving
from kvlink.control.security import COORDINATOR, EVERY_TENANT, Caller, Role, TenantsFile
from kvlink.control.security.callers import _OBSERVERS_CALL, set_caller
from kvlink.control.security.policy import Trust
from kvlink.control.security.tenants import parse
from kvlink.control.security.tokens import digest
from kvlink.control.values import Claim, Watch
from kvlink.coordinator import Coordinator
from kvlink.coordinator.coordinator import store_maker
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.coordinator.tenant_stores import TenantStores, stores
from kvlink.errors import AccessDenied, ConfigError, UnknownRequest
from kvlink.monitoring.fleet_view import plain
from kvlink.types import Joined, NativeChannel


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


@pytest.fixture(params=["memory", "etcd"])
async def coordinator(pki: Pki, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Coordinator]:
    name = "memory"
    if request.param == "etcd":
        name = f"etcd://{request.getfixturevalue('etcd').addresses}/{tmp_path.name}"
    security = pki.coordinator()
    coordinator = Coordinator(stores(store_maker(name), security), security=security)
    await coordinator.start()
    yield coordinator
    await coordinator.close()


async def test_tenants_are_strangers_under_the_same_names(pki: Pki, coordinator: Coordinator) -> None:
    """Both have a worker "prefill" and a request "r"."""
    async with (
        CoordinatorClient(coordinator.address, security=pki.worker("acme")) as acme,
        CoordinatorClient(coordinator.address, security=pki.worker("other")) as other,
    ):
        settled: list[tuple[int, int]] = []
        session = await Session.join(acme, make_card(), lambda slot, nonce: settled.append((slot, nonce)))
        await session.offer(make_offer("r"))

        assert await other.workers() == []
        with pytest.raises(UnknownRequest, match="'prefill' is not joined"):
            await other.worker("prefill")
        with pytest.raises(UnknownRequest, match="no worker offered it"):
            await other.claim("r", timeout_s=0.05)
        with pytest.raises(UnknownRequest, match="'prefill' is not joined"):
            await other.settle(SettleOrder("prefill", session.card.epoch, 1, 2))
        async with aclosing(other.watch()) as changes, other.handoffs() as stream:
            await other.join(make_card("theirs", process=2))
            assert [(await anext(changes)).card.worker_id] == ["theirs"]
            with pytest.raises(UnknownRequest):
                await stream.settle(SettleOrder("prefill", session.card.epoch, 1, 2))

        await other.join(make_card("prefill", epoch=99, process=3))
        await other.offer(replace_ticket("r", 99, b"theirs"))
        await other.leave("prefill", session.card.epoch)
        assert [card.epoch for card in await acme.workers()] == [session.card.epoch]
        assert await acme.claim("r", timeout_s=1.0) == [make_offer("r").ticket]
        assert await other.claim("r", timeout_s=1.0) == [b"theirs"]
        assert (await acme.status()).workers == 1
        assert (await other.status()).workers == 2
        assert settled == []
        await session.close()


async def test_stores_of_tenants_are_closed_with_theirs() -> None:
    tenants = TenantStores(lambda tenant: MemoryStore())
    set_caller(Caller("acme"))
    await tenants.workers()  # so that it has started
    waiting = tenants.claim(Claim("r", 60.0))
    await tenants.close()
    assert waiting.done()
    with pytest.raises(RefusedError, match="is shutting down"):
        await waiting


async def test_what_workers_report_stays_with_their_tenant(pki: Pki, coordinator: Coordinator) -> None:
    """Although both workers are called "prefill" and have epoch 1."""
    async with (
        CoordinatorClient(coordinator.address, security=pki.worker("acme")) as acme,
        CoordinatorClient(coordinator.address, security=pki.worker("other")) as other,
        CoordinatorClient(coordinator.address, security=pki.coordinator()) as observer,
    ):
        for client, report in ((acme, WorkerReport(active_leases=7)), (other, WorkerReport(active_leases=9))):
            await client.join(make_card())
            stream = client.keep_alive()
            await stream.send(Beat("prefill", 1, report))
            assert (await stream.receive()) is not None
            (view,) = (await client.overview()).workers
            assert view.report == report
        of_acme, of_all = await acme.overview(), await observer.overview()
        assert [(view.tenant, view.report) for view in of_acme.workers] == [
            ("acme", WorkerReport(active_leases=7))
        ]
        assert of_acme.calls == of_acme.refusals == (), "what others call is none of its business"
        assert of_all.calls
        rows = plain(await observer.status(), of_all)["workers"]
        assert [(row["worker"], row["leases"]["active_leases"]) for row in rows] == [
            ("acme/prefill", 7),
            ("other/prefill", 9),
        ]


def replace_ticket(request_id: str, epoch: int, ticket: bytes) -> Any:
    return make_offer(request_id, epoch=epoch)._replace(ticket=ticket)


def test_what_observers_may_call_is_there() -> None:
    names = {method.name for method in vars(CoordinatorCalls).values() if isinstance(method, Method)}
    assert names > _OBSERVERS_CALL
    assert not _OBSERVERS_CALL & {
        "Join",
        "KeepAlive",
        "Leave",
        "Offer",
        "Claim",
        "Settle",
        "Handoffs",
        "WatchWorkers",
    }


async def test_a_coordinator_counts_all_tenants_and_shows_no_keys(pki: Pki, coordinator: Coordinator) -> None:
    """As `kvlink status` with the coordinator's own certificate."""
    for number, tenant in enumerate(("acme", "other")):
        async with CoordinatorClient(coordinator.address, security=pki.worker(tenant)) as client:
            card = make_card(f"of {tenant}", process=number)
            await client.join(replace(card, channel=NativeChannel(("10.0.0.1:1",), bytes(16), bytes(32))))
            await client.offer(make_offer("r", f"of {tenant}"))
    async with CoordinatorClient(coordinator.address, security=pki.coordinator()) as observer:
        status = await observer.status()
        assert (status.workers, status.tickets, status.offered) == (2, 2, 2)
        cards = {card.worker_id: card for card in await observer.workers()}
        assert set(cards) == {"of acme", "of other"}
        shown = cards["of acme"].transports
        assert cards["of acme"].channel is None
        assert [(way.name, way.address, way.pool_keys, way.lease_keys) for way in shown] == [
            ("shm", b"", (), ()),
            ("tcp", b"", (), ()),
        ]
        for call in (
            lambda: observer.claim("r", timeout_s=0.1),
            lambda: observer.join(make_card()),
            lambda: observer.offer(make_offer("r")),
            lambda: observer.settle(SettleOrder("of acme", 1, 1, 1)),
            lambda: observer.leave("of acme", 1),
        ):
            with pytest.raises(AccessDenied, match="you are an observer here and may not call"):
                await call()
        async with aclosing(observer._channel.receive(*_watching())) as changes:  # type: ignore[attr-defined]
            with pytest.raises(AccessDenied, match="may not call WatchWorkers"):
                await anext(changes)
        stream = observer.handoffs()
        with pytest.raises(AccessDenied, match="may not call Handoffs"):
            await stream.offer(make_offer("s"))
        await stream.close()


def _watching() -> tuple[Any, Any]:
    return CoordinatorCalls.WATCH_WORKERS, Watch()


BY_URI = {"tenant": "acme", "identity": "spiffe://example.org/ns/acme/*"}
BY_NAME = {"tenant": "other", "identity": "batch.example.org"}
BY_TOKEN = {"tenant": "acme", "token_sha256": digest("s3cret"), "role": "observer"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "tenants.json"
    write_rules(file, BY_URI, BY_NAME, BY_TOKEN)
    return file


@pytest.fixture
async def ruled(pki: Pki, file: Path) -> AsyncIterator[str]:
    """The address of a coordinator that goes by the file."""
    coordinator = Coordinator(security=pki.coordinator(), gate=TenantsFile(file, look_every_s=0.0))
    yield await coordinator.start()
    await coordinator.close()


async def test_the_file_maps_certificates_and_is_read_again(pki: Pki, file: Path, ruled: str) -> None:
    by_uri = secured(pki.files("uri", ["spiffe://example.org/ns/acme/prefill-0", *HOSTS]))
    by_name = secured(pki.files("name", ["batch.example.org", *HOSTS]))
    async with (
        CoordinatorClient(ruled, security=by_uri) as acme,
        CoordinatorClient(ruled, security=by_name) as other,
        CoordinatorClient(ruled, security=pki.worker("acme")) as stranger,
    ):
        await acme.join(make_card())
        assert len(await acme.workers()) == 1
        assert await other.workers() == []
        # A tenant's name in the certificate means nothing beside a file.
        with pytest.raises(AccessDenied, match=r"no rule .* fits a certificate with acme"):
            await stranger.workers()

        write_rules(file, BY_NAME)
        with pytest.raises(AccessDenied, match="no rule"):
            await acme.workers()
        file.write_text("[")
        assert await other.workers() == []


async def test_the_file_maps_tokens(pki: Pki, ruled: str, tmp_path: Path) -> None:
    acme = secured(pki.files("uri", ["spiffe://example.org/ns/acme/prefill-0", *HOSTS]))
    other = secured(pki.files("name", ["batch.example.org", *HOSTS]))
    known, unknown = tmp_path / "known", tmp_path / "unknown"
    known.write_text("s3cret\n")
    unknown.write_text("guess")
    async with (
        CoordinatorClient(ruled, security=acme) as worker,
        CoordinatorClient(ruled, security=replace(other, token_file=str(known))) as observer,
        CoordinatorClient(ruled, security=replace(acme, token_file=str(unknown))) as guesser,
    ):
        await worker.join(make_card())
        assert [card.worker_id for card in await observer.workers()] == ["prefill"]
        with pytest.raises(AccessDenied, match="observer here and may not call Claim"):
            await observer.claim("r", timeout_s=0.1)
        with pytest.raises(AccessDenied, match="tenants file fits your token"):
            await guesser.workers()


def write_rules(file: Path, *rules: dict[str, str]) -> None:
    file.write_text(json.dumps(rules))


async def test_tokens_mean_nothing_without_a_file(pki: Pki, coordinator: Coordinator, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("s3cret")
    client = replace(pki.worker(), token_file=str(token_file))
    async with CoordinatorClient(coordinator.address, security=client) as caller:
        with pytest.raises(AccessDenied, match="start it with --tenants FILE"):
            await caller.workers()


async def test_watchers_see_their_tenant_leave(pki: Pki, coordinator: Coordinator) -> None:
    async with CoordinatorClient(coordinator.address, security=pki.worker("acme")) as acme:
        await acme.join(make_card())
        async with aclosing(acme.watch()) as changes:
            assert (await anext(changes)).card.transports == make_card().transports
            await acme.leave("prefill", 1)
            assert (await anext(changes)).what is Joined.DOWN


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("{}", "must hold a JSON list of rules"),
        ("[1]", "rule 1 of f must be a JSON object whose values are strings"),
        ('[{"tenant": "a", "identity": "x"}, {"tenant": 1}]', "rule 2 of f must be"),
        (
            '[{"tenant": "a", "identity": "x", "admin": "yes"}]',
            "has unknown fields admin; known are identity, role",
        ),
        ('[{"tenant": "a"}]', "needs either identity or token_sha256"),
        ('[{"tenant": "a", "token_sha256": "s3cret"}]', "64 hexadecimal digits"),
        ('[{"tenant": "a", "identity": "x", "role": "root"}]', "role must be worker or observer, not 'root'"),
        ('[{"tenant": "A_1", "identity": "x"}]', "'A_1' is not a valid tenant: use 1 to 63 of a-z"),
        ('[{"identity": "x"}]', "'' is not a valid tenant"),
        ('[{"tenant": "*", "identity": "x"}]', r"tenant \* is for observers"),
    ],
)
def test_a_malformed_file_is_refused_with_the_rule(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(text.encode(), "f")


def test_the_first_rule_that_fits_decides(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    rules = [
        {"tenant": "a", "identity": "a.example.org", "role": "observer"},
        {"tenant": "b", "identity": "a.*"},
        {"tenant": "*", "identity": COORDINATOR, "role": "observer"},
    ]
    file.write_text(json.dumps(rules))
    gate = TenantsFile(file)
    assert gate("Status", ["x", "a.example.org"], "") == Caller("a", Role.OBSERVER)
    assert gate("Claim", ["a.example.com"], "") == Caller("b")
    assert gate("Status", [COORDINATOR], "") == Caller(EVERY_TENANT, Role.OBSERVER)
    with pytest.raises(RefusedError):
        gate("Status", ["a"], "")
    with pytest.raises(RefusedError):
        gate("Status", ["a.example.org"], "a.example.org")


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.text(),
        lambda x: (
            st.lists(x) | st.dictionaries(st.sampled_from(["tenant", "identity", "token_sha256", "role"]), x)
        ),
    ).map(lambda x: json.dumps(x).encode())
)
def test_foreign_bytes_are_refused_or_rules(text: bytes) -> None:
    try:
        rules = parse(text, "f")
    except ConfigError:
        return
    for rule in rules:
        assert bool(rule.identity) != bool(rule.token_sha256)
        assert rule.caller.tenant


class _Apart(Security):
    """Its clients have connections of their own, as those of other processes do."""

    def workers(self, tenant: str | None = None) -> Trust:
        trust = super().workers(tenant)
        return _OwnConnection(trust.security, trust.wanted, trust.tokens, trust.host_tokens)


class _OwnConnection(Trust):
    def dial(self, address: str, options: Any) -> Any:
        return super().dial(address, [*options, ("grpc.use_local_subchannel_pool", 1)])


class Slow:
    """A transport that admits nobody yet."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.callers: list[int] = []

    def __call__(
        self, transport: str, hellos: list[bytes], takes_keys: bool, caller: int
    ) -> tuple[int, list[bytes]]:
        self.callers.append(caller)
        assert self.go_on.wait(60)
        return 1, hellos


@asynccontextmanager
async def serving_slowly() -> AsyncIterator[tuple[Slow, str]]:
    slow = Slow()
    agent = WorkerAgent(slow, lambda slot, nonce: True, lambda slot, nonce: True)
    agent.publish(make_card())
    yield slow, await agent.start()
    slow.go_on.set()
    await agent.close()


def connects(client: AgentClient, number: int) -> list[asyncio.Future[Any]]:
    return [asyncio.ensure_future(client.connect("prefill", 1, "tcp", [b""])) for _ in range(number)]


@pytest.mark.verify
async def test_a_worker_admits_a_bounded_number_of_readers_at_a_time_and_of_one_caller_fewer() -> None:
    async with (
        serving_slowly() as (slow, address),
        AgentClient(address, 60.0, _Apart()) as flooder,
        AgentClient(address, 60.0, _Apart()) as another,
        AgentClient(address, 60.0, _Apart()) as third,
    ):
        flood = connects(flooder, MAX_CONNECTS_OF_ONE + 5)
        refused, _ = await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
        for call in refused:
            with pytest.raises(Overloaded, match=f"{MAX_CONNECTS_OF_ONE} of them for this caller; retry"):
                call.result()
        honest = connects(another, MAX_CONNECTS - MAX_CONNECTS_OF_ONE)
        assert await flooder.card() == make_card(), "other calls are answered meanwhile"
        late = connects(third, 1)
        with pytest.raises(
            Overloaded, match=f"already admitting {MAX_CONNECTS} readers, 0 of them for this caller"
        ):
            await late[0]
        slow.go_on.set()
        results = await asyncio.gather(*flood, *honest, return_exceptions=True)
    assert sum(isinstance(result, Overloaded) for result in results) == 5
    assert len(set(slow.callers)) == 2


class Call(NamedTuple):
    """Has the part of gRPC's context that counts."""

    address: str
    identities: tuple[bytes, ...] | None = None

    def peer(self) -> str:
        return self.address

    def peer_identities(self) -> tuple[bytes, ...] | None:
        return self.identities


def number(*of: Any) -> int:
    serving(Call(*of))
    return caller_number()


def test_processes_of_this_host_and_other_hosts_are_told_apart() -> None:
    assert number("ipv4:127.0.0.1:1") != number("ipv4:127.0.0.1:2")
    assert number("ipv6:%5B::1%5D:1") != number("ipv6:%5B::1%5D:2")
    assert number("ipv4:10.0.0.1:1") == number("ipv4:10.0.0.1:2") == number("ipv6:%5B::ffff:10.0.0.1%5D:3")
    assert number("ipv4:10.0.0.1:1") != number("ipv4:10.0.0.2:1")
    assert number("ipv4:10.0.0.1:1", (b"a",)) != number("ipv4:10.0.0.1:1", (b"b",))
    assert 0 <= number("ipv4:10.0.0.1:1") < 1 << 64


@pytest.fixture
def pair() -> Iterator[tuple[Worker, Worker]]:
    pool = wide(num_blocks=8)
    with Worker(pool.make(), "owner") as owner, Worker(pool.make(), "reader") as reader:
        yield owner, reader


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_hellos_of_one_caller_shut_no_reader_out(pair: tuple[Worker, Worker], transport: str) -> None:
    owner, reader = pair
    (way,) = (way for way in owner.card.transports if way.name == transport)
    hello = reader._engine.open(transport, way.address, "owner", 0).hellos()[0]
    async with AgentClient(owner.card.agent, 60.0, _Apart()) as flooder:
        for _ in range(80):
            await flooder.connect("owner", owner.card.epoch, transport, [hello] * MAX_HELLOS)
        with Worker(wide(num_blocks=8).make(), "honest", transports=transport) as honest:
            pull = honest.pull(owner.offer("r", [1, 2]), [1, 2])
            assert await asyncio.to_thread(pull.wait, 20)
            assert [peer.transport for peer in honest.peers()] == [transport]
