# SPDX-License-Identifier: Apache-2.0
"""Surprises of how NIXL uses a backend, and the promises that hold all the same: docs/servers/nixl.md."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from agents import Agent, agents, introduce, reserved_port

pytestmark = [pytest.mark.verify, pytest.mark.timeout(300)]

MIB = 1 << 20
PATHS = ["cma", "tcp"]


def pool(owner: Agent, key: str = "pool", seed: int = 7) -> int:
    return int(owner(f"register({key!r}, 1 << 20, {seed})"))


def read(reader: Agent, at: int, note: bytes = b"") -> None:
    """Prepares a read of the whole pool as 256 pieces."""
    reader("prepare('read', 'owner', 'into', at, 256, 4096, note)", at=at, note=note)


def holds(reader: Agent, seed: int = 7) -> bool:
    return bool(reader("equals('into', seed, 256, 4096, 1 << 20)", seed=seed))


@pytest.mark.parametrize("path", PATHS)
def test_a_handle_is_posted_often_and_notifies_each_time(path: str) -> None:
    with agents("owner", "reader", KVLINK_TRANSPORTS=path) as (owner, reader):
        at = pool(owner)
        reader("register('into', 1 << 20)")
        introduce(reader, owner)
        read(reader, at)
        for number in range(50):
            reader("memory['into'].fill(0)")
            assert reader("wait('read', note)", note=b"%d" % number) == "DONE", reader.said()
            assert holds(reader)
        assert owner("notes(50)") == {"reader": [b"%d" % number for number in range(50)]}


@pytest.mark.parametrize("path", PATHS)
def test_memory_that_is_registered_after_the_first_read(path: str) -> None:
    with agents("owner", "reader", KVLINK_TRANSPORTS=path) as (owner, reader):
        at = pool(owner)
        reader("register('into', 1 << 20)")
        introduce(reader, owner)
        read(reader, at)
        assert reader("wait('read')") == "DONE"
        at = pool(owner, "late", 8)
        reader("register('also', 1 << 20)")
        introduce(reader, owner)
        reader("prepare('late', 'owner', 'also', at, 256, 4096)", at=at)
        assert reader("wait('late')") == "DONE", reader.said()
        assert reader("equals('also', 8, 256, 4096, 1 << 20)")
        assert reader("wait('read')") == "DONE"  # the old handle goes on


def test_only_one_end_has_metadata_and_yet_notifies() -> None:
    with agents("owner", "reader") as (owner, reader):
        introduce(reader, owner)
        reader("[agent.send_notif('owner', b'%d' % n) for n in range(1000)]")
        assert owner("notes(1000)") == {"reader": [b"%d" % n for n in range(1000)]}
        with pytest.raises(RuntimeError, match="nixlNotFoundError"):
            owner("agent.send_notif('reader', b'nobody told me')")


def test_too_many_notifications_are_refused_and_none_is_lost() -> None:
    with agents("owner", "reader") as (owner, reader):
        introduce(reader, owner)
        reader("[agent.send_notif('owner', bytes(1 << 20)) for n in range(15)]")
        with pytest.raises(RuntimeError):
            reader("[agent.send_notif('owner', bytes(1 << 20)) for n in range(2)]")
        assert "16 MiB" in reader.said()
        assert len(owner("notes(15)")["reader"]) == 15
        reader("agent.send_notif('owner', b'again')")
        assert owner("notes(1)") == {"reader": [b"again"]}


@pytest.mark.parametrize("path", PATHS)
def test_many_threads_post_check_and_release(path: str) -> None:
    with agents("owner", "reader", KVLINK_TRANSPORTS=path) as (owner, reader):
        at = pool(owner)
        for number in range(8):
            reader(f"register('into{number}', 1 << 20)")
        introduce(reader, owner)
        reader(
            "[t.join() for t in [t for n in range(8) for t in [threading.Thread(target=lambda n=n: ["
            "(prepare(f'{n}', 'owner', f'into{n}', at, 256, 4096), ends.append(wait(f'{n}', b'x')),"
            " agent.release_xfer_handle(handles.pop(f'{n}'))) for _ in range(50)])] if not t.start()]]",
            at=at,
            ends=[],
        )
        for number in range(8):
            assert reader(f"equals('into{number}', 7, 256, 4096, 1 << 20)")
        assert len(owner("notes(400)")["reader"]) == 400


@pytest.mark.parametrize("path", PATHS)
def test_transfers_within_one_agent(path: str) -> None:
    with agents("alone", KVLINK_TRANSPORTS=path) as (alone,):
        at = pool(alone)
        alone("register('into', 1 << 20)")
        alone("prepare('read', 'alone', 'into', at, 256, 4096, b'to myself')", at=at)
        assert alone("wait('read')") == "DONE", alone.said()
        assert alone("equals('into', 7, 256, 4096, 1 << 20)")
        assert alone("notes(1)") == {"alone": [b"to myself"]}


def test_write_is_refused_by_name() -> None:
    with agents("owner", "reader") as (owner, reader):
        at = pool(owner)
        reader("register('into', 1 << 20)")
        introduce(reader, owner)
        with pytest.raises(RuntimeError, match="nixlNotSupportedError"):
            reader("prepare('write', 'owner', 'into', at, 1, 4096, b'', 'WRITE')", at=at)
        assert "refuses WRITE" in reader.said()


@pytest.mark.parametrize("path", PATHS)
def test_deregistered_memory_of_a_peer_is_stale(path: str) -> None:
    with agents("owner", "reader", KVLINK_TRANSPORTS=path) as (owner, reader):
        at = pool(owner)
        kept = pool(owner, "kept", 9)
        reader("register('into', 1 << 20)")
        introduce(reader, owner)
        read(reader, at)
        reader("prepare('kept', 'owner', 'into', kept, 256, 4096)", kept=kept)
        assert reader("wait('read')") == "DONE"
        owner("deregister('pool')")
        assert reader("wait('read', b'')") not in ("DONE", "PROC")
        assert "deregistered memory" in reader.said()
        assert owner("agent.get_new_notifs()") == {}
        assert reader("wait('kept')") == "DONE", reader.said()  # under the next seat
        assert holds(reader, 9)


@pytest.mark.parametrize("path", PATHS)
def test_deregistration_here_ends_what_reads_into_it(path: str) -> None:
    with agents("owner", "reader", KVLINK_TRANSPORTS=path) as (owner, reader):
        owner("register('pool', 256 << 20, 7)")
        at = owner("memory['pool'].ctypes.data")
        reader("register('into', 256 << 20)")
        introduce(reader, owner)
        reader("prepare('read', 'owner', 'into', at, 1024, 256 << 10)", at=at)
        assert reader("agent.transfer(handles['read'])") == "PROC"
        reader("deregister('into')")
        before = reader("memory['into'].tobytes().count(0)")
        with pytest.raises(RuntimeError, match="nixlCancelledError"):
            reader("agent.check_xfer_state(handles['read'])")
        assert reader("memory['into'].tobytes().count(0)") == before


def test_a_peer_that_restarted_is_refused_and_known_again_with_new_metadata() -> None:
    with agents("owner", "reader", KVLINK_TRANSPORTS="tcp", KVLINK_NIXL_PORT="0") as (owner, reader):
        at = pool(owner)
        reader("register('into', 1 << 20)")
        introduce(reader, owner)
        read(reader, at)
        assert reader("wait('read')") == "DONE"
        owner.end()
        assert reader("wait('read')") not in ("DONE", "PROC")
        with agents("owner", KVLINK_TRANSPORTS="tcp") as (again,):
            at = pool(again, seed=11)
            reader("agent.remove_remote_agent('owner') if agent.check_remote_metadata('owner') else None")
            introduce(reader, again)
            read(reader, at)
            assert reader("wait('read')") == "DONE", reader.said()
            assert holds(reader, 11)


def test_another_process_at_the_address_gets_no_secret_and_gives_no_bytes() -> None:
    with reserved_port() as port, agents("reader", KVLINK_TRANSPORTS="tcp") as (reader,):
        reader("register('into', 1 << 20)")
        with agents("owner", KVLINK_TRANSPORTS="tcp", KVLINK_NIXL_PORT=port) as (owner,):
            at = pool(owner)
            introduce(reader, owner)
            read(reader, at)
            assert reader("wait('read')") == "DONE"
        with agents("owner", KVLINK_TRANSPORTS="tcp", KVLINK_NIXL_PORT=port) as (other,):
            pool(other)
            assert reader("wait('read')") == "nixlRemoteDisconnectError", reader.said()
            assert "restarted" in reader.said()


def test_forged_metadata_is_refused() -> None:
    with agents("owner", "reader") as (owner, reader):
        pool(owner)
        good = bytes(owner("agent.get_agent_metadata()"))
        at = good.index(b"KVN1")
        refused = 0
        for flip in range(at, at + 60):
            forged = good[:flip] + bytes([good[flip] ^ 0x80]) + good[flip + 1 :]
            try:
                reader("agent.add_remote_agent(forged)", forged=forged)
                reader("agent.remove_remote_agent('owner')")
            except RuntimeError:
                refused += 1
        assert refused > 8
        assert reader("1 + 1") == 2


@pytest.mark.parametrize("path", PATHS)
def test_a_stopped_peer_ends_a_transfer_within_the_deadline(path: str) -> None:
    with agents("owner", "reader", KVLINK_TRANSPORTS=path, KVLINK_NIXL_TIMEOUT_MS="1000") as (owner, reader):
        at = pool(owner)
        reader("register('into', 1 << 20)")
        introduce(reader, owner)
        read(reader, at)
        assert reader("wait('read')") == "DONE"
        owner.process.signal(signal.SIGSTOP)
        # The kernel copies out of a stopped process as well; its memory is what it was.
        assert (reader("wait('read')") == "DONE") == (path == "cma")
        owner.process.signal(signal.SIGCONT)
        assert reader("wait('read')") == "DONE", reader.said()


@pytest.mark.parametrize("path", PATHS)
def test_no_byte_lands_after_a_release(path: str) -> None:
    with agents("owner", "reader", KVLINK_TRANSPORTS=path) as (owner, reader):
        owner("register('pool', 64 << 20, 7)")
        at = owner("memory['pool'].ctypes.data")
        reader("register('into', 64 << 20)")
        introduce(reader, owner)
        for wait_us in range(0, 4000, 200):
            reader("prepare('read', 'owner', 'into', at, 256, 256 << 10)", at=at)
            reader("(agent.transfer(handles['read']), time.sleep(us / 1e6))[0]", us=wait_us)
            reader("agent.release_xfer_handle(handles.pop('read'))")
            reader("memory['into'].fill(0)")
            assert reader("(time.sleep(0.01), bool(memory['into'].any()))[1]") is False
