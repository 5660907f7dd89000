# SPDX-License-Identifier: Apache-2.0
"""Checks what kvlink takes for granted of LMCache, and reads between two memories of one process over its channel.

The tests need LMCache, in which the lane of the engines runs them.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from waiting import eventually

pytest.importorskip(
    "lmcache.v1.distributed.transfer_channel",
    reason="no LMCache: run .ci/engines lmcache, then make test-engines",
)

import zmq
from lmcache.v1.distributed import transfer_channel
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.transfer_channel import TransferChannelAddress, abstract, factory
from lmcache.v1.multiprocess.config import P2PConfig, add_p2p_args

from kvlink import WorkerConfig
from kvlink.control.security.tickets import ticket_keys
from kvlink.errors import ConfigError, PeerUnreachable
from kvlink.integrations.lmcache import channel, register
from kvlink.integrations.lmcache.__main__ import p2p_config
from kvlink.integrations.lmcache.reads import DEFAULT_S
from kvlink.integrations.lmcache.sockets import Secrets, be_owner, be_reader
from kvlink.runtime import supervised

PAGE, NUM_PAGES = 4096, 16
_HOST = f"127.{os.getpid() >> 16 & 127}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
"""An address of loopback that no other process uses."""


def address(number: int) -> str:
    return f"{_HOST}:{7600 + number}"


def secret() -> bytes:
    """That of all processes of this user. Peers of tests have it, too."""
    return Secrets(ticket_keys(WorkerConfig()))()[0]


class Memory:
    """LMCache's memory, and the context that its factory makes for `--p2p-transfer-engine kvlink`."""

    def __init__(self, number: int) -> None:
        self.bytes = np.full(PAGE * NUM_PAGES, number, np.uint8)
        desc = L1MemoryDesc(self.bytes.ctypes.data, self.bytes.nbytes, PAGE)
        self.context = factory.create_transfer_channel_context(
            "kvlink", desc, address(number), address(number)
        )


@pytest.fixture
def memories() -> Iterator[tuple[Memory, Memory]]:
    register()
    first, second = Memory(1), Memory(2)
    yield first, second
    second.context.close()
    first.context.close()
    first.context.close()


def test_lmcache_knows_the_name() -> None:
    register()
    register()
    assert factory._TRANSFER_CHANNEL_FACTORY_REGISTRY["kvlink"] is channel.create_context
    with pytest.raises(ValueError, match="kvlnik"):
        transfer_channel.initialize_transfer_channel_context("kvlnik", None, "", "")


@pytest.mark.parametrize("name", ["TransferChannelClient", "TransferChannelContext", "TransferChannelServer"])
def test_every_method_takes_the_arguments_that_lmcache_passes(name: str) -> None:
    theirs, ours = getattr(abstract, name), getattr(channel, f"KVLink{name}")
    assert not ours.__abstractmethods__
    for method in theirs.__abstractmethods__ - {"__init__"}:
        expected = inspect.signature(getattr(theirs, method)).parameters
        assert list(inspect.signature(getattr(ours, method)).parameters) == list(expected), method


def test_a_reads_deadline_is_before_lmcaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards LMCache gives the memory of the read to another object."""
    monkeypatch.delenv("KVLINK_TIMEOUT_S", raising=False)
    assert channel.check_times(P2PConfig()) == DEFAULT_S < P2PConfig().load_timeout
    assert channel.check_times(P2PConfig(load_timeout=5)) == 4
    monkeypatch.setenv("KVLINK_TIMEOUT_S", "20")
    with pytest.raises(ConfigError, match="KVLINK_TIMEOUT_S"):
        register(P2PConfig(load_timeout=5))
    options = add_p2p_args(argparse.ArgumentParser()).parse_args(["--p2p-transfer-engine", "kvlink"])
    assert options.p2p_transfer_engine == "kvlink"


def test_a_read_between_two_servers(memories: tuple[Memory, Memory]) -> None:
    owner, reader = memories
    owner.bytes[3 * PAGE : 5 * PAGE] = 77
    client = reader.context.get_transfer_channel_client(address(1))
    assert reader.context.get_transfer_channel_client(address(1)) is client
    assert reader.context.get_num_connected_clients() == 1
    ours = reader.context.get_transfer_channel_address([(0, PAGE), (8 * PAGE, 2 * PAGE)])
    theirs = [TransferChannelAddress(0, PAGE), TransferChannelAddress(3 * PAGE, 2 * PAGE)]
    assert finished(client, client.submit_read(ours, theirs)) == [True, True]
    assert set(reader.bytes[:PAGE]) == {1}
    assert set(reader.bytes[8 * PAGE : 10 * PAGE]) == {77}
    assert set(reader.bytes[PAGE : 8 * PAGE]) == {2}
    beyond = [TransferChannelAddress(NUM_PAGES * PAGE, PAGE)]
    assert finished(client, client.submit_read(ours[:1], beyond)) == [False]
    nowhere = reader.context.get_transfer_channel_address([(NUM_PAGES * PAGE, PAGE), (0, PAGE), (None, 1)])
    assert [each.is_valid() for each in nowhere] == [False, True, False]
    assert finished(client, client.submit_read(nowhere[:2], theirs[:1] * 2)) == [False, True]
    assert finished(client, client.submit_read(ours, [None, None])) == [False, False]
    assert finished(client, client.submit_read(ours, theirs[:1])) == [False, False]
    assert finished(client, 10**9) == []
    reader.context.remove_transfer_channel_client(address(1))
    reader.context.remove_transfer_channel_client(address(1))
    assert reader.context.get_num_connected_clients() == 0


def test_a_peer_that_is_not_there(memories: tuple[Memory, Memory], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_GREETING_S", 0.0)
    with pytest.raises(PeerUnreachable, match="--p2p-advertise-url"):
        memories[0].context.get_transfer_channel_client(address(9))
    assert memories[0].context.get_num_connected_clients() == 0


def test_an_address_in_use_is_named(memories: tuple[Memory, Memory]) -> None:
    with pytest.raises(PeerUnreachable, match="--p2p-listen-url"):
        Memory(1)


def test_the_hosts_are_lmcaches_unless_kvlink_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVLINK_HOST", "KVLINK_ADVERTISE", "KVLINK_TIMEOUT_S"):
        monkeypatch.delenv(name, raising=False)
    config = channel._config("0.0.0.0:7600", "tcp://10.0.0.7:7600", P2PConfig())
    assert (config.host, config.advertise, config.timeout_s) == ("0.0.0.0", "10.0.0.7", DEFAULT_S)
    config = channel._config("10.0.0.7:7600", "10.0.0.7:7600", P2PConfig())
    assert (config.host, config.advertise) == ("10.0.0.7", "")
    monkeypatch.setenv("KVLINK_HOST", "10.1.0.7")
    monkeypatch.setenv("KVLINK_TIMEOUT_S", "5")
    config = channel._config("10.0.0.7:7600", "10.0.0.7:7600", P2PConfig())
    assert (config.host, config.advertise, config.timeout_s) == ("10.1.0.7", "", 5.0)


GARBAGE: list[list[bytes]] = [
    [b""],
    [b"x", b"y"],
    [b""] * 100,
    [b"{" * 100_000],
    [b"[" * 100_000],
    [b"\xff" * 1000],
    [b" " * (4 << 20)],
    [b'{"version": 3, "models": {}, "reader": "\\ud800", "page_bytes": 4096, "owners": [], "objects": []}'],
    [b"\x80\x04\x95"],
]


@pytest.mark.parametrize("kind", ["REQ", "DEALER", "ROUTER", "PUSH", "PUB", "PAIR", "SUB", "raw"])
def test_no_message_ends_the_thread_that_answers(memories: tuple[Memory, Memory], kind: str) -> None:
    """Each sender is one socket of its own that is left behind, as a scanner of ports leaves it."""
    owner, reader = memories
    client = reader.context.get_transfer_channel_client(address(1))
    with zmq.Context() as theirs:
        for frames in GARBAGE:
            send(theirs, kind, frames)
        ours = [TransferChannelAddress(0, PAGE)]
        assert finished(client, client.submit_read(ours, ours)) == [True]
    assert owner.context._server._answering.thread.is_alive()
    assert not supervised.failures().get("lmcache-answer")


def send(theirs: Any, kind: str, frames: list[bytes]) -> None:
    """Sends the frames and waits until they have left, or the socket has refused them."""
    if kind == "raw":
        with socket.create_connection(address(1).split(":")) as raw:
            raw.sendall(b"".join(frames)[:1000] or b"\0")
        return
    with theirs.socket(getattr(zmq, kind)) as sender:
        sender.setsockopt(zmq.LINGER, 200)
        be_reader(sender, secret())
        if kind == "DEALER":
            sender.setsockopt(zmq.IDENTITY, b"\x01same")
        sender.connect(f"tcp://{address(1)}")
        with contextlib.suppress(zmq.ZMQError):
            sender.send_multipart(frames, zmq.NOBLOCK)


def test_a_peer_with_other_answers_delays_nobody(memories: tuple[Memory, Memory]) -> None:
    """A server that takes connections at the address of a peer, and answers what it likes."""
    answers = [[b"!no"], [b"="], [b"x", b"y"], [b""], [b"", b""], [b"\xff" * 64]]
    with zmq.Context() as theirs, theirs.socket(zmq.REP) as other:
        be_owner(other, secret())
        other.bind(f"tcp://{address(5)}")

        def answer() -> None:
            other.recv_multipart()
            other.send(b"")
            for frames in answers:
                other.recv_multipart()
                other.send_multipart(frames)

        thread = threading.Thread(target=answer)
        thread.start()
        client = memories[1].context.get_transfer_channel_client(address(5))
        ours = [TransferChannelAddress(0, PAGE)]
        for _ in answers:
            assert finished(client, client.submit_read(ours, ours)) == [False]
        thread.join()
        memories[1].context.remove_transfer_channel_client(address(5))


def test_a_client_of_a_silent_peer_is_closed_at_once(memories: tuple[Memory, Memory]) -> None:
    """And not when the time of its read is over, which is longer than that of the test."""
    with zmq.Context() as theirs, theirs.socket(zmq.REP) as silent:
        be_owner(silent, secret())
        silent.bind(f"tcp://{address(6)}")
        thread = threading.Thread(target=lambda: (silent.recv(), silent.send(b"")))
        thread.start()
        client = memories[1].context.get_transfer_channel_client(address(6))
        thread.join()
        client._reads.timeout_s = 1e6
        ours = [TransferChannelAddress(0, PAGE)]
        task = client.submit_read(ours, ours)
        eventually(lambda: silent.poll(0))
        memories[1].context.remove_transfer_channel_client(address(6))
        assert finished(client, task) == []
        assert finished(client, client.submit_read(ours, ours)) == [False]


def test_the_arguments_tell_of_a_server_that_reads() -> None:
    p2p = ["--p2p-advertise-url", "10.0.0.7:7600", "--p2p-transfer-engine", "kvlink"]
    config = p2p_config(["server", "--l1-size-gb", "64", *p2p, "--p2p-load-timeout=5", "--port", "9"])
    assert config is not None
    assert config.load_timeout == 5
    assert p2p_config(["tool", "transfer-channel-benchmark", "--role", "server"]) is None
    assert p2p_config(["server", *p2p[:2]]) is None


def finished(client: Any, task: int) -> list[bool]:
    def result() -> Any:
        asked = client.query_read_status(task)
        return asked if asked.is_finished() else None

    return list(eventually(result).succeeded_mask)
