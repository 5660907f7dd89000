# SPDX-License-Identifier: Apache-2.0
"""Two memories with LMCache's own L1Managers: a read of an object that has gone never gets another one's bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

pytest.importorskip(
    "lmcache.v1.distributed.transfer_channel",
    reason="no LMCache: run .ci/engines lmcache, then make test-engines",
)

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters.p2p_l2_adapter import P2PL2Adapter
from lmcache.v1.distributed.memory_manager import L1MemoryManager
from lmcache.v1.distributed.transfer_channel import TransferChannelAddress, factory
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.memory_management import AddressManager
from lmcache.v1.multiprocess.config import P2PConfig

from kvlink.errors import ConfigError
from kvlink.integrations.lmcache import adapter, l1, register
from kvlink.integrations.lmcache.adapter import ObjectAddress
from kvlink.integrations.lmcache.channel import create_context

MIB = 1 << 20
SIZE = MIB
_HOST = f"127.{os.getpid() >> 16 & 127 | 128}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
"""An address of loopback that no other process uses."""


def key(number: int) -> ObjectKey:
    return ObjectKey(bytes([number]) * 32, "model", 0)


def manager(num_bytes: int = 16 * MIB, read_ttl_s: int = 300) -> L1Manager:
    memory = L1MemoryManagerConfig(size_in_bytes=num_bytes, use_lazy=False, shm_name="")
    return L1Manager(L1ManagerConfig(memory, read_ttl_seconds=read_ttl_s))


class Memory:
    """A memory of LMCache with its manager and kvlink's channel."""

    def __init__(
        self, number: int, num_bytes: int = 16 * MIB, read_ttl_s: int = 300, host: str = _HOST
    ) -> None:
        self.manager = manager(num_bytes, read_ttl_s)
        self.address = f"{host}:{7700 + number}"
        desc = self.manager.get_l1_memory_desc()
        self.context = factory.create_transfer_channel_context("kvlink", desc, self.address, self.address)

    def reserve(self, number: int, size: int = SIZE) -> Any:
        layout = MemoryLayoutDesc([torch.Size([size])], [torch.uint8])
        error, reserved = self.manager.reserve_write([key(number)], [False], layout, "tag")[key(number)]
        assert error == L1Error.SUCCESS
        return reserved

    def store(self, number: int, value: int, size: int = SIZE) -> ObjectAddress:
        """Stores an object, and takes a read lock as a peer's lookup does."""
        stored = self.reserve(number, size)
        stored.tensor.fill_(value)
        self.manager.finish_write([key(number)], "tag")
        self.manager.reserve_read([key(number)])
        return ObjectAddress(stored.shm_offset, stored.shm_byte_length, key(number))

    def close(self) -> None:
        self.context.close()
        self.manager.close()


class Pair:
    """An owner that holds the object 1, and a reader with a place for it."""

    def __init__(self, read_ttl_s: int = 300) -> None:
        self.owner, self.reader = Memory(1, read_ttl_s=read_ttl_s), Memory(2)
        self.client = self.reader.context.get_transfer_channel_client(self.owner.address)
        self.first = self.owner.store(1, 0xAA)
        self.room = self.reader.reserve(9)
        self.ours = self.reader.context.get_transfer_channel_address([(self.room.shm_offset, SIZE)])

    def read(self, *theirs: TransferChannelAddress) -> list[bool]:
        return finished(self.client, self.client.submit_read(self.ours * len(theirs), list(theirs)))

    def replace(self, forced: bool = True) -> ObjectAddress:
        """Gives the place of object 1 to object 2, which somebody reads, too."""
        self.owner.manager.delete([key(1)], force=forced)
        second = self.owner.store(2, 0xBB)
        assert second.offset == self.first.offset
        return second

    def close(self) -> None:
        self.reader.close()
        self.owner.close()


def finished(client: Any, task: int) -> list[bool]:
    def result() -> Any:
        asked = client.query_read_status(task)
        return asked if asked.is_finished() else None

    return list(eventually(result).succeeded_mask)


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_an_object_is_read_under_its_key(pair: Pair) -> None:
    assert pair.read(pair.first) == [True]
    assert set(pair.room.raw_data.tolist()) == {0xAA}
    assert pair.read(ObjectAddress(pair.first.offset, SIZE, key(7))) == [False]
    assert pair.read(ObjectAddress(pair.first.offset, SIZE // 2, key(1))) == [False]
    eventually(lambda: not len(pair.owner.context._places) and not len(pair.reader.context._places))


def test_an_address_without_a_key_means_the_first_object_of_its_place(pair: Pair) -> None:
    plain = TransferChannelAddress(pair.first.offset, SIZE)
    assert pair.read(plain) == [True]
    assert pair.read(TransferChannelAddress(pair.first.offset + SIZE, SIZE)) == [False], "nothing is there"
    second = pair.replace()
    assert pair.read(plain) == [False]
    assert pair.read(second) == [True]


FREES: dict[str, Callable[[L1Manager], Any]] = {
    "deleted by force": lambda held: held.delete([key(1)], force=True),
    "cleared by force": lambda held: held.clear(force=True),
    "deleted after it was read": lambda held: (held.finish_read([key(1)]), held.delete([key(1)])),
    "cleared after it was read": lambda held: (held.finish_read([key(1)]), held.clear()),
}


@pytest.mark.parametrize("free", FREES.values(), ids=FREES)
def test_an_object_that_was_freed_is_not_read(pair: Pair, free: Callable[[L1Manager], Any]) -> None:
    free(pair.owner.manager)
    second = pair.owner.store(2, 0xBB)
    assert second.offset == pair.first.offset
    assert pair.read(pair.first) == [False]
    assert pair.read(second) == [True]


@pytest.mark.parametrize("free", FREES.values(), ids=FREES)
def test_an_object_that_is_freed_under_its_lease_is_not_read(
    pair: Pair, free: Callable[[L1Manager], Any]
) -> None:
    """After the lease was granted, and before a byte is read."""
    exchange = pair.client._asking
    granted: list[bytes] = []

    def slow(message: bytes, timeout_s: float) -> bytes:
        granted.append(exchange(message, timeout_s))
        free(pair.owner.manager)
        assert pair.owner.store(2, 0xBB).offset == pair.first.offset
        return granted[-1]

    peer = pair.client._reads._peer
    pair.client._reads._peer = type(peer)(peer.reader, peer.owner, slow)
    assert pair.read(pair.first) == [False]
    assert granted[0].startswith(b"=\0\0\0\0"), "the lease was granted"


def test_a_temporary_object_ends_with_its_last_reader(pair: Pair) -> None:
    layout = MemoryLayoutDesc([torch.Size([SIZE])], [torch.uint8])
    stored = pair.owner.manager.reserve_write([key(3)], [True], layout)[key(3)][1]
    where = ObjectAddress(stored.shm_offset, SIZE, key(3))
    assert pair.read(where) == [False], "it is being written"
    pair.owner.manager.finish_write_and_reserve_read([key(3)])
    assert pair.read(where) == [True]
    pair.owner.manager.finish_read([key(3)])
    assert pair.read(where) == [False]


@pytest.mark.verify
def test_an_object_whose_read_lock_has_lapsed_is_not_read() -> None:
    pair = Pair(read_ttl_s=1)
    try:
        state = pair.owner.manager.get_object_state(key(1))
        eventually(lambda: not state.read_lock.is_locked())
        assert pair.read(pair.first) == [False]
        pair.replace(forced=False)
        assert pair.read(pair.first) == [False]
    finally:
        pair.close()


def test_the_readers_memory_is_its_own_again_once_it_is_freed(pair: Pair) -> None:
    """LMCache frees the place of a read that it gave up on, whatever the channel still does."""
    exchange = pair.client._asking

    def slow(message: bytes, timeout_s: float) -> bytes:
        answer = exchange(message, timeout_s)
        pair.reader.manager.finish_write_and_delete([key(9)], "tag")
        return answer

    peer = pair.client._reads._peer
    pair.client._reads._peer = type(peer)(peer.reader, peer.owner, slow)
    task = pair.client.submit_read(pair.ours, [pair.first])
    assert finished(pair.client, task) == [False]
    other = pair.reader.reserve(8)
    assert other.shm_offset == pair.ours[0].offset
    assert 0xAA not in set(other.raw_data.tolist())


def test_a_key_of_another_kind_is_no_key(pair: Pair) -> None:
    for strange in ["key", 7, object()]:
        assert l1.name_of_key(strange) is None
    assert l1.name_of_key(key(1)) == ("01" * 32, "model", 0, 0, "")
    bad = ObjectAddress(pair.first.offset, SIZE, key(1))
    object.__setattr__(bad, "key", ObjectKey(b"\x01", "model", 0))
    assert pair.read(bad) == [False]


class Adapter:
    """The parts of LMCache's adapter of a peer that its `submit_load_task` uses."""

    def __init__(self, pair: Pair, load_timeout_s: float) -> None:
        self._next_task_id, self._load_tasks = 0, {}
        self._remote_addresses = {key(1): TransferChannelAddress(pair.first.offset, SIZE)}
        self._tc_context, self._tc_client = pair.reader.context, pair.client
        self._config = type("Config", (), {"load_timeout_s": load_timeout_s})


def test_lmcaches_adapter_passes_its_keys_and_its_time(pair: Pair) -> None:
    reads = Adapter(pair, 5)
    task = P2PL2Adapter.submit_load_task(reads, [key(1)], [pair.room])
    assert reads._remote_addresses[key(1)] == pair.first
    assert pair.client._reads.timeout_s == 4
    assert eventually(lambda: P2PL2Adapter.query_load_result(reads, task)).test(0)
    assert P2PL2Adapter.submit_load_task(reads, [key(2)], [pair.room]) == 1, "as LMCache alone does it"
    register()
    assert not hasattr(P2PL2Adapter.submit_load_task.__wrapped__, adapter._DONE), "it is changed once"


def test_a_server_without_the_manager_of_its_memory_does_not_start() -> None:
    room = bytearray(4096)
    address = (L1MemoryDesc(id(room), len(room), 4096), f"{_HOST}:7711", f"{_HOST}:7711")
    with pytest.raises(ConfigError, match="L1 managers"):
        create_context(*address, p2p=P2PConfig())


def test_memory_has_one_channel_and_is_left_as_it_was(pair: Pair) -> None:
    spaces = l1._address_manager(pair.owner.manager)
    with pytest.raises(ConfigError, match="already"):
        l1.L1Memory(pair.owner.manager, pair.owner.context._places)
    assert "free" in vars(spaces)
    pair.owner.context.close()
    assert "free" not in vars(spaces)


def past_the_address_manager(self: Any, objects: list[Any], *_: Any) -> None:
    for each in objects:
        AddressManager.free(self.address_manager, each.meta.address, each.meta.phy_size)
        each.invalidate()


@pytest.mark.parametrize(
    ("owner", "attribute", "changed"),
    [
        (L1Manager, "_gauge_targets", None),
        (L1Manager, "get_object_state", None),
        (AddressManager, "free", lambda self, block: None),
        (L1MemoryManager, "free", lambda self, mem_objs, later: None),
        (TensorMemoryAllocator, "batched_free", past_the_address_manager),
    ],
)
def test_an_lmcache_with_other_parts_is_refused(
    monkeypatch: pytest.MonkeyPatch, owner: type, attribute: str, changed: Any
) -> None:
    held = manager()
    desc = held.get_l1_memory_desc()
    if changed is None:
        monkeypatch.delattr(owner, attribute)
    else:
        monkeypatch.setattr(owner, attribute, changed)
    with pytest.raises(ConfigError, match=r"install LMCache 0\.5\.6"):
        create_context(desc, f"{_HOST}:7712", f"{_HOST}:7712")
    monkeypatch.undo()
    assert "free" not in vars(l1._address_manager(held))
    held.close()


def test_an_adapter_with_other_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for changed in (lambda self, keys: None, lambda self, keys, objects: None):
        monkeypatch.setattr(P2PL2Adapter, "submit_load_task", changed)
        with pytest.raises(ConfigError, match=r"install LMCache 0\.5\.6"):
            register()


def keep_replacing(owner: Memory, where: dict[int, ObjectAddress], stopping: threading.Event) -> None:
    """Frees objects by force, as their readers read them, and stores others at their places."""
    chance = random.Random(1)
    while not stopping.is_set():
        if len(where) > 10:
            gone = chance.choice(list(where))
            del where[gone]
            owner.manager.delete([key(gone)], force=True)
        number = chance.choice([each for each in range(20, 60) if each not in where])
        where[number] = owner.store(number, number)
        stopping.wait(0.001)


def keep_reading(pair: Pair, where: dict[int, ObjectAddress], seed: int, counts: Counter[str]) -> None:
    """Reads, or gives up on reads and frees their memory. Counts objects with any bytes but their own."""
    chance, reader = random.Random(seed), pair.reader
    for number in range(300):
        if not (theirs := [each for each in list(where.values()) if chance.random() < 0.4][:3]):
            continue
        keys = [key(100 + seed * 10 + index) for index in range(len(theirs))]
        layout = MemoryLayoutDesc([torch.Size([SIZE])], [torch.uint8])
        rooms = [
            room for _, room in reader.manager.reserve_write(keys, [False] * len(keys), layout, "t").values()
        ]
        ours = reader.context.get_transfer_channel_address([(room.shm_offset, SIZE) for room in rooms])
        task = pair.client.submit_read(ours, theirs)
        if number % 4:
            for has_arrived, room, wanted in zip(finished(pair.client, task), rooms, theirs, strict=True):
                is_right = set(room.raw_data[::1024].tolist()) == {wanted.key.chunk_hash[0]}
                counts["failed" if not has_arrived else "right" if is_right else "wrong"] += 1
        reader.manager.finish_write_and_delete(keys, "t")


@pytest.mark.verify
def test_objects_that_are_freed_and_read_at_once(pair: Pair) -> None:
    where: dict[int, ObjectAddress] = {}
    stopping, counts = threading.Event(), Counter[str]()
    peer, exchange = pair.client._reads._peer, pair.client._asking

    def slow(message: bytes, timeout_s: float) -> bytes:
        answer = exchange(message, timeout_s)
        stopping.wait(0.003)  # leases are a while older when their objects are read
        return answer

    pair.client._reads._peer = type(peer)(peer.reader, peer.owner, slow)
    replacing = threading.Thread(target=keep_replacing, args=(pair.owner, where, stopping))
    reading = [threading.Thread(target=keep_reading, args=(pair, where, seed, counts)) for seed in (1, 2)]
    replacing.start()
    eventually(lambda: len(where) > 5)
    for thread in reading:
        thread.start()
    for thread in reading:
        thread.join()
    stopping.set()
    replacing.join()
    assert counts["right"]
    assert not counts["wrong"]
    pair.owner.manager.clear(force=True)
    assert not len(pair.owner.context._places)
    assert not len(pair.reader.context._places)


OWNER = """
import sys; sys.path[:0] = {path!r}
from test_lmcache_objects import MIB, Memory, register
register()
owner = Memory(3, 128 * MIB, host={host!r})
print("offset", owner.store(1, 0xAA, 96 * MIB).offset, flush=True)
sys.stdin.read()
"""


@pytest.mark.verify
def test_a_stopped_owners_bytes_do_not_arrive_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner stops in the middle of a read, LMCache gives up, and another object is stored where it arrived."""
    monkeypatch.setenv("KVLINK_TRANSPORTS", "tcp")
    path = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    command = [sys.executable, "-P", "-c", OWNER.format(path=path, host=_HOST)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        try:
            offset = next(int(line.split()[1]) for line in owner.stdout or () if line.startswith("offset"))
            reader = Memory(4, 128 * MIB)
            room = reader.reserve(9, 96 * MIB)
            room.raw_data.fill_(0)
            client = reader.context.get_transfer_channel_client(f"{_HOST}:7703")
            ours = reader.context.get_transfer_channel_address([(room.shm_offset, 96 * MIB)])
            task = client.submit_read(ours, [ObjectAddress(offset, 96 * MIB, key(1))])
            eventually(lambda: int((room.raw_data[::MIB] == 0xAA).sum()) >= 2)
            os.kill(owner.pid, signal.SIGSTOP)
            assert not client.query_read_status(task).is_finished(), "it arrived before the owner stopped"
            reader.manager.finish_write_and_delete([key(9)], "tag")
            other = reader.reserve(8, 96 * MIB)
            assert other.shm_offset == ours[0].offset
            other.raw_data.fill_(0xBB)
            os.kill(owner.pid, signal.SIGCONT)
            assert finished(client, task) == [False]
            again = client.submit_read(
                reader.context.get_transfer_channel_address([(reader.reserve(7).shm_offset, MIB)]),
                [ObjectAddress(offset, MIB, key(1))],
            )
            assert finished(client, again) == [False], "the owner answers again: no object of this size"
            assert set(other.raw_data[::4096].tolist()) == {0xBB}
            assert int((other.raw_data == 0xAA).sum()) == 0
            reader.close()
        finally:
            os.kill(owner.pid, signal.SIGCONT)
            owner.kill()
