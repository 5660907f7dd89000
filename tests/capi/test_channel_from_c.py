# SPDX-License-Identifier: Apache-2.0
"""A reader in C connects by the native channel, or gets a code and a sentence that say why it does not."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from capi.node import (
    CONFIG,
    DENIED,
    FOR_EVER,
    HANDLE,
    OK,
    PEER_CONNECTED,
    PENDING,
    STALE,
    TIMEOUT,
    UNAVAILABLE,
    UNREACHABLE,
    CodeError,
    COwner,
    Event,
    Node,
    begin,
    dial,
)
from waiting import eventually

from kvlink.types import NEEDS_TLS, WorkerCard

pytestmark = pytest.mark.verify


@pytest.fixture
def owner() -> Iterator[COwner]:
    """An owner that listens."""
    with closing(COwner("shm,tcp", "alloc", with_agent=False, channel_port=0)) as owner:
        yield owner


@pytest.fixture
def reader() -> Iterator[Node]:
    with closing(Node("reader", "shm,tcp")) as reader:
        yield reader


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a listener that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def changed(card: WorkerCard, **fields: object) -> WorkerCard:
    """The card with another native channel."""
    assert card.channel is not None
    return replace(card, channel=replace(card.channel, **fields))


def refused(reader: Node, card: WorkerCard, timeout_us: int = 0) -> CodeError:
    """Returns why a card does not connect."""
    with pytest.raises(CodeError) as raised:
        dial(reader, card, timeout_us)
    return raised.value


def test_an_event_tells_that_a_peer_is_connected(owner: COwner, reader: Node) -> None:
    peer = begin(reader, owner.card)
    seen: list[Event] = []
    eventually(lambda: seen.extend(reader.events()) or seen)
    assert seen == [Event(PEER_CONNECTED, peer, 11, OK)]
    assert ": shm" in reader.do("explain", peer)
    reader.pull(peer, owner.offer([3]), [1], how="now")


@pytest.mark.parametrize("transport", ["shm", "cma", "tcp"])
def test_pulls_end_with_the_process_of_their_owner(transport: str) -> None:
    with (
        closing(COwner(transport, "alloc", with_agent=False, channel_port=0)) as owner,
        closing(Node("reader", transport)) as reader,
    ):
        peer = dial(reader, owner.card)
        _, ticket = owner.node.offer([0, 1], ready=1)
        pull = reader.pull(peer, ticket, [4, 5], timeout_us=3_600_000_000)
        owner.kill()
        assert reader.refusal("wait", pull, FOR_EVER) == UNREACHABLE
        assert ", broken: " in reader.do("explain", peer)


def test_a_wrong_secret(owner: COwner, reader: Node) -> None:
    error = refused(reader, changed(owner.card, secret=bytes(32)))
    assert error.code == DENIED
    assert "the secret of the native channel is not that of this worker's card" in str(error)
    dial(reader, owner.card)


def test_a_listener_that_is_not_there(owner: COwner, reader: Node) -> None:
    owner.kill()
    error = refused(reader, owner.card)
    assert error.code == UNREACHABLE
    assert "cannot connect to 127.0.0.1:" in str(error)


def test_an_owner_that_restarted_at_the_same_port(owner: COwner, reader: Node) -> None:
    assert owner.card.channel is not None
    port = int(owner.card.channel.addresses[0].rpartition(":")[2])
    owner.kill()
    with closing(COwner("shm,tcp", "alloc", with_agent=False, channel_port=port)) as again:
        error = refused(reader, owner.card)
        assert error.code == STALE
        assert "restarted" in str(error)
        dial(reader, again.card)


def test_a_card_for_another_worker_of_the_process(owner: COwner, reader: Node) -> None:
    error = refused(reader, replace(owner.card, epoch=owner.card.epoch + 1))
    assert error.code == UNREACHABLE
    assert f"owner epoch {owner.card.epoch} answers" in str(error)


def test_a_card_without_a_channel(reader: Node) -> None:
    with closing(COwner("shm", "alloc", with_agent=False)) as owner:
        error = refused(reader, owner.card)
    assert error.code == CONFIG
    assert "the card of owner has no native channel: open its worker with KVL_WORKER_CHANNEL" in str(error)


@pytest.mark.parametrize(
    ("flags", "why"), [(NEEDS_TLS, "asks for TLS"), (6, "flags 6 for its native channel")]
)
def test_a_channel_that_forbids_itself(owner: COwner, reader: Node, flags: int, why: str) -> None:
    error = refused(reader, changed(owner.card, flags=flags))
    assert error.code == UNAVAILABLE
    assert why in str(error)


def test_an_owner_that_is_silent(owner: COwner, reader: Node, silent: str) -> None:
    card = changed(owner.card, addresses=(silent,))
    error = refused(reader, card, 1000)
    assert error.code == TIMEOUT
    assert f"{silent} does not answer" in str(error)
    peer = begin(reader, card, 3_600_000_000)
    assert reader.refusal("connected", peer, 0) == PENDING
    assert reader.refusal("connect", peer, 0) == CONFIG  # it does already
    assert reader.refusal("step", peer, "-") == CONFIG
    reader.do("close", peer)
    assert reader.refusal("connected", peer, 0) == HANDLE
    begin(reader, card, 3_600_000_000)
    reader.do("close", 0)  # at once


def test_a_peer_that_connects_by_messages_does_not_wait(owner: COwner, reader: Node) -> None:
    peer = int(reader.do("peer", owner.node.card().hex(), 0))
    assert reader.refusal("connected", peer, 0) == CONFIG
    assert reader.bytes_of("step", peer, "-")
    assert reader.refusal("connected", peer, 0) == CONFIG
    assert reader.refusal("connect", peer, 0) == CONFIG


def test_a_port_that_is_taken(silent: str) -> None:
    port = int(silent.rpartition(":")[2])
    with pytest.raises(CodeError, match="the native channel"):
        Node("owner", "shm", channel_port=port)
