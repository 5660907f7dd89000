# SPDX-License-Identifier: Apache-2.0
"""One of two coordinators is cut off from a real etcd. Whoever asks it first is served by the other."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from control.cards import make_card, make_offer
from control.etcd_cluster import EtcdCluster, start_etcd
from control.processes import CoordinatorProcess
from grpc_health.v1 import health_pb2
from waiting import until

from kvlink.control import CoordinatorClient
from kvlink.control.security import Security
from kvlink.control.session import Session
from kvlink.types import Joined

pytestmark = [pytest.mark.verify, pytest.mark.claims_move_on, pytest.mark.timeout(120)]

_NOTICED_WITHIN_S = 8.0
"""A pulse, 3 s of doubt, and a busy machine."""


class Cable:
    """Carries bytes to an address, until it is cut."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._whole = asyncio.Event()
        self._whole.set()
        self._ends: set[asyncio.StreamWriter] = set()
        self._refuses = False

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self, silently: bool) -> None:
        """Bytes go nowhere; or connections are ended as soon as they come."""
        if silently:
            self._whole.clear()
            return
        self._refuses = True
        for end in self._ends:
            end.transport.abort()

    def mend(self) -> None:
        self._refuses = False
        self._whole.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._ends |= {writer, far_writer}
        await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while blob := await source.read(1 << 16):
                await self._whole.wait()
                sink.write(blob)
                await sink.drain()
        sink.transport.abort()

    async def close(self) -> None:
        self._server.close()
        self.mend()
        for end in self._ends:
            end.transport.abort()


@pytest.fixture
def real_etcd() -> Iterator[EtcdCluster]:
    etcd = start_etcd()
    yield etcd
    etcd.close()


@pytest.fixture
async def cable(real_etcd: EtcdCluster) -> AsyncIterator[Cable]:
    cable = Cable(real_etcd.addresses)
    await cable.start()
    yield cable
    await cable.close()


@pytest.fixture
async def replicas(real_etcd: EtcdCluster, cable: Cable) -> AsyncIterator[list[CoordinatorProcess]]:
    """The first one reaches etcd by the cable."""
    stores = [f"etcd://{address}/cut" for address in (cable.address, real_etcd.addresses)]
    started = [asyncio.to_thread(CoordinatorProcess, 10.0, store) for store in stores]
    replicas = await asyncio.gather(*started)
    yield replicas
    for each in replicas:
        each.kill()


def first_asking(replicas: list[CoordinatorProcess]) -> CoordinatorClient:
    """A client that asks them in this order."""
    addresses = [each.address for each in replicas]
    client = CoordinatorClient(",".join(addresses))
    client._channel._servers.sort(key=lambda server: addresses.index(server.address))
    return client


async def serves(replica: CoordinatorProcess) -> bool:
    channel = Security.from_env().coordinators().dial(replica.address, [])
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    blob = await check(health_pb2.HealthCheckRequest(service="kvlink.v1.Coordinator").SerializeToString())
    await channel.close()
    return bool(
        health_pb2.HealthCheckResponse.FromString(blob).status == health_pb2.HealthCheckResponse.SERVING
    )


async def refuses(replica: CoordinatorProcess) -> bool:
    return not await serves(replica)


async def hand_off(session: Session, reader: CoordinatorClient, name: str) -> float:
    """Returns how long it took."""
    began = time.monotonic()
    offer = make_offer(name, session.card.worker_id, session.card.epoch, ttl_s=60.0)
    claiming = asyncio.create_task(reader.claim(name, timeout_s=60.0))
    await session.offer(offer, timeout_s=30.0)
    assert await claiming == [offer.ticket]
    session.forget(name)
    return time.monotonic() - began


@pytest.mark.parametrize("silently", [True, False], ids=["silently", "refused"])
async def test_claims_and_watches_go_to_the_other(
    replicas: list[CoordinatorProcess], cable: Cable, silently: bool
) -> None:
    clients = [first_asking(replicas) for _ in range(12)]
    session = await Session.join(clients[0], make_card(), lambda slot, nonce: None, 20.0)
    for number, client in enumerate(clients[1:]):
        await hand_off(session, client, f"before-{number}")
    watch = clients[1].watch()
    assert (await anext(watch)).what is Joined.UP
    assert await serves(replicas[0])

    cable.cut(silently)
    took = [hand_off(session, client, f"cut-{number}") for number, client in enumerate(clients[2:])]
    assert max(await asyncio.gather(*took)) < _NOTICED_WITHIN_S
    async with first_asking(replicas[1:]) as other:
        joined = await other.join(make_card("late", process=2))
        change = await anext(watch)
        assert (change.what, change.card.worker_id) == (Joined.UP, "late")
        await other.leave("late", joined.epoch)
        assert (await anext(watch)).what is Joined.DOWN
    await until(lambda: refuses(replicas[0]))
    assert await serves(replicas[1])
    async with first_asking(replicas) as fresh:
        assert await hand_off(session, fresh, "at the lost one first") < 2.0

    cable.mend()
    await until(lambda: serves(replicas[0]))
    async with first_asking(replicas[:1]) as only:
        await hand_off(session, only, "after")
    await watch.aclose()  # type: ignore[attr-defined]
    await session.close()
    for client in clients:
        await client.close()
