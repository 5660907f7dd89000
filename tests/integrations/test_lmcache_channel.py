# SPDX-License-Identifier: Apache-2.0
"""Checks what kvlink takes for granted of LMCache, and reads between two memories of one process over its channel.

The tests need LMCache, in which the lane of the engines runs them.
"""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from waiting import eventually

pytest.importorskip(
    "lmcache.v1.distributed.transfer_channel",
    reason="no LMCache: run .ci/engines lmcache, then make test-engines",
)

from lmcache.v1.distributed import transfer_channel
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.transfer_channel import TransferChannelAddress, abstract, factory
from lmcache.v1.multiprocess.config import P2PConfig, add_p2p_args

from kvlink.errors import ConfigError, PeerUnreachable
from kvlink.integrations.lmcache import channel, register

PAGE, NUM_PAGES = 4096, 16
_HOST = f"127.{os.getpid() >> 16 & 127}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
"""An address of loopback that no other process uses."""


def address(number: int) -> str:
    return f"{_HOST}:{7600 + number}"


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


def test_a_reads_deadline_is_before_lmcaches() -> None:
    """Afterwards LMCache gives the memory of the read to another object."""
    assert P2PConfig().load_timeout > channel._TIMEOUT_S
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
    with pytest.raises(ConfigError):
        reader.context.get_transfer_channel_address([(NUM_PAGES * PAGE, PAGE)])
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
    config = channel._config("0.0.0.0:7600", "tcp://10.0.0.7:7600")
    assert (config.host, config.advertise, config.timeout_s) == ("0.0.0.0", "10.0.0.7", channel._TIMEOUT_S)
    config = channel._config("10.0.0.7:7600", "10.0.0.7:7600")
    assert (config.host, config.advertise) == ("10.0.0.7", "")
    monkeypatch.setenv("KVLINK_HOST", "10.1.0.7")
    monkeypatch.setenv("KVLINK_TIMEOUT_S", "5")
    config = channel._config("10.0.0.7:7600", "10.0.0.7:7600")
    assert (config.host, config.advertise, config.timeout_s) == ("10.1.0.7", "", 5.0)


def finished(client: Any, task: int) -> list[bool]:
    def result() -> Any:
        asked = client.query_read_status(task)
        return asked if asked.is_finished() else None

    return list(eventually(result).succeeded_mask)
