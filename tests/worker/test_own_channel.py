# SPDX-License-Identifier: Apache-2.0
"""A worker with KVLINK_CHANNEL, whose readers know its card and use its native channel instead of its agent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from control.certificates import HOSTS, Pki
from waiting import eventually
from worker.soft_server import LAYOUT, blocks_of

from kvlink import BlockPool, Ticket, Worker, WorkerConfig, _core
from kvlink.control import SettleOrder
from kvlink.control.codec import CARD
from kvlink.control.security import tenant_name
from kvlink.errors import ConfigError, PeerUnreachable, TransportUnavailable, UnknownRequest
from kvlink.types import WorkerCard

BLOCKS, INTO = [9, 3, 30], [4, 5, 6]


class Pair:
    """The reader gets the owner's card and tickets without the address of its agent."""

    def __init__(self, opened: ExitStack) -> None:
        self._opened = opened
        self.owner = self.worker("owner", channel="on")
        self.reader = self.worker("reader")
        blocks_of(self.owner)[:] = np.random.default_rng(55).integers(0, 256, blocks_of(self.owner).shape)
        self.reader.add_card(self.sealed())

    def worker(self, name: str, **config: str) -> Worker:
        options = WorkerConfig(transports="tcp", ticket_keys="none", **config)  # type: ignore[arg-type]
        return self._opened.enter_context(Worker(BlockPool.allocate(LAYOUT), name, config=options))

    def sealed(self) -> bytes:
        card: WorkerCard = CARD.decode(self.owner.sealed_card())
        return CARD.encode(replace(card, agent=""))

    def offer(self, request_id: str = "request") -> Ticket:
        return replace(self.owner.offer(request_id, BLOCKS), agent="")


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_reader_connects_and_pulls_by_the_channel(opened: ExitStack) -> None:
    pair = Pair(opened)
    pair.reader.pull(pair.offer(), INTO, timeout_s=60).wait()
    assert (blocks_of(pair.reader)[:, INTO] == blocks_of(pair.owner)[:, BLOCKS]).all()
    eventually(lambda: pair.owner.lease_counts().settled == 1)


def test_a_reader_releases_by_the_channel(opened: ExitStack) -> None:
    pair = Pair(opened)
    pair.reader.release(pair.offer())
    eventually(lambda: pair.owner.lease_counts().settled == 1)
    assert not pair.reader.peers()


def test_a_reader_that_asks_again_learns_that_the_owner_drains(opened: ExitStack) -> None:
    pair = Pair(opened)
    directory = pair.reader._membership.directory
    pair.owner.drain(0)

    async def asked() -> WorkerCard:
        return await directory.card("owner", pair.owner.card.epoch, "", fresh=True)

    assert pair.reader._control.run(asked(), 60).draining


def test_connections_end_when_the_owner_closes_its_end(opened: ExitStack) -> None:
    pair = Pair(opened)
    pair.reader.connect(pair.offer(), 60)
    (peer,) = pair.reader.peers()
    pair.owner._engine.channel.close()  # the data path still works
    eventually(lambda: peer.connection.broken)
    assert "process has ended" in peer.connection.why_broken()


def test_an_owner_that_is_gone_is_no_error_of_a_release(opened: ExitStack) -> None:
    pair = Pair(opened)
    ticket = pair.offer()
    directory = pair.reader._membership.directory
    port = pair.owner.card.channel.addresses[0].rpartition(":")[2]  # type: ignore[union-attr]
    pair.owner.close()
    pair.worker("another", channel=port)

    async def settled() -> None:
        await directory.channels.settle(_order(pair, ticket))

    with pytest.raises(UnknownRequest, match="restarted or ended"):
        pair.reader._control.run(settled(), 60)


def _order(pair: Pair, ticket: Ticket) -> SettleOrder:
    seat = ticket.seats[0]
    return SettleOrder("owner", ticket.epoch, seat.slot, seat.settle_nonce)


def test_the_secret_shows_in_no_text(opened: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    pair = Pair(opened)
    pull = pair.reader.pull(pair.offer(), INTO, timeout_s=60)
    pull.wait()
    channel = pair.owner.card.channel
    assert channel is not None
    texts = [pair.owner, pair.owner.card, channel, pair.owner.config, pair.reader, pull, pull.explain()]
    shown = "\n".join([*map(repr, texts), *map(str, texts), repr(pair.reader.peers()), caplog.text])
    for secret in (channel.secret, channel.instance):
        assert secret.hex() not in shown.lower()
        assert repr(secret)[2:-1] not in shown


def test_workers_have_no_channel_by_default(opened: ExitStack) -> None:
    plain = opened.enter_context(
        Worker(BlockPool.allocate(LAYOUT), "plain", config=WorkerConfig(transports="tcp"))
    )
    assert plain.card.channel is None
    reader = opened.enter_context(
        Worker(BlockPool.allocate(LAYOUT), "reader", config=WorkerConfig(transports="tcp"))
    )
    with pytest.raises(ConfigError, match="card of plain has no native channel"):
        reader.add_card(plain.sealed_card())
    with pytest.raises(ConfigError, match="malformed SealedCard"):
        reader.add_card(plain.sealed_card()[1:])


def test_a_ticket_without_an_agent_needs_a_card(opened: ExitStack) -> None:
    pair = Pair(opened)
    stranger = pair.worker("stranger")
    with pytest.raises(ConfigError, match=r"give its card to add_card\(\)"):
        stranger.pull(pair.offer(), INTO, timeout_s=60).wait()


def test_a_channel_that_another_worker_has_now_is_not_believed(opened: ExitStack) -> None:
    pair = Pair(opened)
    card: WorkerCard = CARD.decode(pair.sealed())
    pair.reader.add_card(CARD.encode(replace(card, worker_id="before")))
    asks = pair.reader._membership.directory.card("before", card.epoch, "", fresh=True)
    with pytest.raises(PeerUnreachable, match="owner answers at the native channel of before"):
        pair.reader._control.run(asks, 60)


def test_a_worker_does_not_listen_in_plaintext_where_it_must_not() -> None:
    beyond = WorkerConfig(transports="tcp", host="0.0.0.0", advertise="10.0.0.1", channel="on")
    with pytest.raises(ConfigError, match="must be allowed explicitly"):
        Worker(BlockPool.allocate(LAYOUT), "owner", config=beyond)


def test_tls_and_the_channel_exclude_each_other(opened: ExitStack, tmp_path: Path) -> None:
    ca, cert, key = map(str, Pki(tmp_path).files("worker", [tenant_name("acme"), *HOSTS]))

    def worker(name: str, channel: str) -> Worker:
        config = WorkerConfig(
            transports="tcp", tls_ca=ca, tls_cert=cert, tls_key=key, ticket_keys="none", channel=channel
        )
        return opened.enter_context(Worker(BlockPool.allocate(LAYOUT), name, config=config))

    with pytest.raises(ConfigError, match="KVLINK_CHANNEL: the native channel has no TLS"):
        worker("owner", "on")
    pair = Pair(opened)
    secured = worker("secured", "off")
    secured.add_card(pair.sealed())
    with pytest.raises(TransportUnavailable, match="has only a native channel, which has no TLS"):
        secured.pull(pair.offer(), INTO, timeout_s=60).wait()


def test_a_native_reader_connects_to_a_worker(opened: ExitStack) -> None:
    pair = Pair(opened)
    channel, card = pair.owner.card.channel, pair.owner.card
    assert channel is not None
    own = _core.Channel()
    opened.callback(own.close)
    client = own.dial(list(channel.addresses), channel.instance, channel.secret, 0, 60.0)
    assert CARD.decode(client.card(60.0)) == card
    engine = _core.Engine(8, ["tcp"], "127.0.0.1", 0, "", 64, 1, 500.0, 1, ())
    engine.add_pool_region(_core.HostMemory(1 << 16))
    engine.start()
    opened.callback(engine.close)
    (tcp,) = card.transports
    connection = engine.open("tcp", tcp.address, _core.PathStats("tcp"), card.worker_id, card.epoch)
    number, replies, pool_keys, lease_keys = client.connect(
        card.worker_id, card.epoch, "tcp", connection.hellos(), 60.0
    )
    keys = pool_keys or list(tcp.pool_keys), lease_keys or list(tcp.lease_keys)
    assert connection.establish(number, replies, *keys, card.epoch, 60.0) == [0]
