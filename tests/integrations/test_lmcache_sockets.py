# SPDX-License-Identifier: Apache-2.0
"""The channel between LMCache's servers: who has no secret of an end gets no data, and no message of theirs is read.

The tests need pyzmq, which comes with LMCache.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

pytest.importorskip("zmq", reason="no pyzmq: run .ci/engines lmcache, then make test-engines")

import zmq

from kvlink.config import WorkerConfig
from kvlink.control.security.tickets import TicketKeys, ticket_keys
from kvlink.errors import AccessDenied, KVLinkError, PeerUnreachable
from kvlink.integrations.lmcache.sockets import Answering, Asking, Secrets, be_owner, be_reader

KEY, NEW = "k" * 32, "n" * 32
ADDRESS = f"127.{os.getpid() >> 16 & 127}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}:7633"
"""An address of loopback that no other process uses."""
MINUTE_S = 60


class Heard:
    """The owner's answers, and the messages that it has received."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.refused: list[KVLinkError] = []

    def answer(self, message: bytes) -> bytes:
        self.messages.append(message)
        return b"answer to " + message

    def refuse(self, error: KVLinkError) -> bytes:
        self.refused.append(error)
        return b"!"


class Place:
    """The ends of the channel, and others at its address."""

    def __init__(self, opened: ExitStack, folder: Path) -> None:
        self.opened = opened
        self.folder = folder
        self.heard = Heard()
        self.context: zmq.Context[Any] = opened.enter_context(zmq.Context())

    def keys(self, name: str, *secrets: str) -> TicketKeys:
        self.write(name, *secrets)
        return TicketKeys.of_file(self.folder / name, look_every_s=0.0)

    def write(self, name: str, *secrets: str) -> None:
        (self.folder / name).write_text("\n".join(secrets))

    def owner(self, keys: TicketKeys | None) -> Answering:
        owner = Answering(self.context, ADDRESS, keys, self.heard, lambda: None)
        self.opened.callback(owner.close)
        return owner

    def reader(self, keys: TicketKeys | None, address: str = ADDRESS) -> Asking:
        reader = Asking(self.context, address, keys)
        self.opened.callback(reader.close)
        return reader

    def socket(self, kind: int) -> Any:
        made = self.opened.enter_context(self.context.socket(kind))
        made.setsockopt(zmq.LINGER, 0)
        return made


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as opened:
        yield Place(opened, tmp_path)


def test_ends_with_one_key_hear_each_other(place: Place) -> None:
    place.owner(place.keys("owner", KEY))
    for secrets in ([KEY], [NEW, KEY], [KEY, NEW]):
        reader = place.reader(place.keys("reader", *secrets))
        assert [reader(b"1", MINUTE_S), reader(b"2", MINUTE_S)] == [b"answer to 1", b"answer to 2"]


def test_without_certificates_and_keys_the_token_of_the_host_is_the_key(place: Place) -> None:
    for name in ("token", "another"):
        place.write(name, f"the token of {name}")
    config = WorkerConfig(token_file=str(place.folder / "token"))
    place.owner(ticket_keys(config))
    assert place.reader(ticket_keys(config))(b"1", MINUTE_S) == b"answer to 1"
    with pytest.raises(AccessDenied, match="KVLINK_TOKEN_FILE of both to one file"):
        place.reader(ticket_keys(WorkerConfig(token_file=str(place.folder / "another"))))(b"2", MINUTE_S)
    assert place.heard.messages == [b"1"]


@pytest.mark.parametrize("options", [{"insecure": True}, {"ticket_keys": "none"}], ids=["insecure", "none"])
def test_where_everybody_is_believed_the_channel_is_plain(place: Place, options: dict[str, Any]) -> None:
    place.owner(ticket_keys(WorkerConfig(**options)))
    assert place.reader(None)(b"1", MINUTE_S) == b"answer to 1"


def test_a_reader_with_other_keys_is_not_heard(place: Place) -> None:
    place.owner(place.keys("owner", KEY))
    with pytest.raises(
        AccessDenied, match=r"did not prove that it has the same keys.*KVLINK_TICKET_KEYS than"
    ):
        place.reader(place.keys("reader", NEW, "o" * 32))(b"1", MINUTE_S)
    assert place.reader(place.keys("good", KEY))(b"2", MINUTE_S) == b"answer to 2"
    assert (place.heard.messages, place.heard.refused) == ([b"2"], [])


FRAMES = [[b"", b"1"], [b"1"], [b""] * 10_000, [b"x" * (1 << 20)] * 64, [b" " * (4 << 20)]]


@pytest.mark.parametrize("kind", ["REQ", "DEALER", "ROUTER", "PUSH", "PUB", "PAIR", "raw"])
@pytest.mark.parametrize("frames", FRAMES, ids=lambda frames: f"{len(frames)} of {len(frames[0])} bytes")
def test_who_proves_nothing_is_not_heard_whatever_is_sent(
    place: Place, kind: str, frames: list[bytes]
) -> None:
    place.owner(place.keys("owner", KEY))
    if kind == "raw":
        with socket.create_connection(ADDRESS.split(":")) as raw, suppress(OSError):
            raw.sendall(b"".join(frames)[:100_000])
            assert len(raw.recv(1 << 16)) <= 64, "ZMQ's greeting only"
    else:
        hostile = place.socket(getattr(zmq, kind))
        failed = place.opened.enter_context(hostile.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL))
        place.opened.callback(hostile.disable_monitor)
        hostile.connect(f"tcp://{ADDRESS}")
        with suppress(zmq.ZMQError):
            hostile.send_multipart(frames, zmq.NOBLOCK)
        assert failed.poll(MINUTE_S * 1000), "the owner takes nothing without a proof"
    assert place.reader(place.keys("good", KEY))(b"good", MINUTE_S) == b"answer to good"
    assert (place.heard.messages, place.heard.refused) == ([b"good"], [])


@pytest.mark.parametrize("proves", [False, True], ids=["plain", "with a key of its own"])
def test_who_took_the_owners_address_is_not_believed_and_hears_nothing(place: Place, proves: bool) -> None:
    impostor = place.socket(zmq.ROUTER)
    if proves:
        be_owner(impostor, bytes(range(32)))
    impostor.bind(f"tcp://{ADDRESS}")
    reader = place.reader(place.keys("reader", KEY))
    for _ in range(2):
        with pytest.raises(AccessDenied, match="did not prove that it has the same keys"):
            reader(b"a secret question", MINUTE_S)
    assert not impostor.poll(0)
    impostor.close()
    eventually(lambda: started(place))
    assert reader(b"1", MINUTE_S) == b"answer to 1", "the owner is back at its address"


def started(place: Place) -> Answering | None:
    """Starts an owner, or returns None while the address is taken."""
    with suppress(PeerUnreachable):
        return place.owner(place.keys("owner", KEY))
    return None


def test_what_was_heard_on_the_way_cannot_be_said_again(place: Place) -> None:
    """All that a reader has sent is recorded between the two, and sent to the owner on connections of their own."""
    place.owner(place.keys("owner", KEY))
    recorded: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as between:
        threading.Thread(target=forward, args=(between, recorded)).start()
        reader = place.reader(place.keys("reader", KEY), f"127.0.0.1:{between.getsockname()[1]}")
        assert reader(b"secret question", MINUTE_S) == b"answer to secret question"
        reader.close()
    assert b"question" not in b"".join(recorded)
    for _ in range(2):
        with socket.create_connection(ADDRESS.split(":")) as again, suppress(OSError):
            again.sendall(b"".join(recorded))
            while again.recv(1 << 16):
                pass
    assert place.reader(place.keys("good", KEY))(b"good", MINUTE_S) == b"answer to good"
    assert place.heard.messages == [b"secret question", b"good"]


def forward(between: socket.socket, recorded: list[bytes]) -> None:
    reader, _ = between.accept()
    with reader, socket.create_connection(ADDRESS.split(":")) as owner:
        back = threading.Thread(target=copy, args=(owner, reader, lambda data: None))
        back.start()
        copy(reader, owner, recorded.append)
        back.join()


def copy(of: socket.socket, to: socket.socket, note: Callable[[bytes], object]) -> None:
    with suppress(OSError):
        while data := of.recv(1 << 16):
            note(data)
            to.sendall(data)
    with suppress(OSError):
        to.shutdown(socket.SHUT_RDWR)


def test_keys_change_in_three_steps(place: Place) -> None:
    place.owner(place.keys("owner", KEY))
    reader = place.reader(place.keys("reader", KEY))
    for step in ([KEY, NEW], [NEW, KEY], [NEW]):
        for name in ("reader", "owner"):
            place.write(name, *step)
            assert reader(b"1", MINUTE_S) == b"answer to 1"
    eventually(lambda: is_answered(place, NEW))
    with pytest.raises(AccessDenied):
        place.reader(place.keys("old", KEY))(b"2", MINUTE_S)


def is_answered(place: Place, key: str) -> bool:
    """Whether an owner that has changed its key listens again: its address is free for a moment."""
    with suppress(AccessDenied, PeerUnreachable):
        return place.reader(place.keys("probe", key))(b"1", 1.0) == b"answer to 1"
    return False


def test_only_who_has_the_secret_can_be_an_owner_or_a_reader(place: Place) -> None:
    """As peers in other tests are."""
    secret = Secrets(place.keys("owner", KEY))()[0]
    place.owner(place.keys("owner", KEY))
    peer = place.socket(zmq.REQ)
    be_reader(peer, secret)
    peer.connect(f"tcp://{ADDRESS}")
    peer.send(b"1")
    assert peer.recv() == b"answer to 1"
