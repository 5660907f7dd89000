# SPDX-License-Identifier: Apache-2.0
"""Agents that are killed, stopped or come and go while others read, and what that leaves behind."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from agents import Agent, agents, introduce

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]

ROUNDS = int(os.environ.get("KVLINK_NIXL_ROUNDS", "10"))
PATHS = ["cma", "tcp"]


def ready(owner: Agent, reader: Agent, seed: int) -> None:
    """Lets the reader prepare a read of 64 pieces."""
    at = owner("register('pool', 1 << 20, seed)", seed=seed)
    introduce(reader, owner)
    reader("prepare('read', owner, 'into', at, 64, 16384, b'read')", at=at, owner=owner.name)


@pytest.mark.parametrize("path", PATHS)
def test_an_owner_that_is_killed_ends_reads_and_gives_no_wrong_bytes(path: str) -> None:
    with agents("reader", KVLINK_TRANSPORTS=path, KVLINK_NIXL_TIMEOUT_MS="5000") as (reader,):
        reader("register('into', 1 << 20)")
        for number in range(ROUNDS):
            with agents(f"owner{number}", KVLINK_TRANSPORTS=path) as (owner,):
                ready(owner, reader, number)
                reader.send(
                    "next((n, end, equals('into', seed, 64, 16384, 1 << 20)) for n in range(10 ** 9) "
                    "for end in [wait('read')] if end != 'DONE' or not equals('into', seed, 64, 16384, 1 << 20))",
                    seed=number,
                )
                assert len(owner("notes(100)")[reader.name]) >= 100  # it reads
                os.kill(owner.process.pid, signal.SIGKILL)
                _, end, _ = reader.answer()
                assert end not in ("DONE", "PROC"), reader.said()


@pytest.mark.parametrize("path", PATHS)
def test_a_reader_that_is_killed_leaves_nothing_at_its_owner(path: str) -> None:
    with agents("owner", KVLINK_TRANSPORTS=path) as (owner,):
        at = owner("register('pool', 1 << 20, 7)")
        counts = []
        for number in range(ROUNDS):
            with agents(f"reader{number}", KVLINK_TRANSPORTS=path) as (reader,):
                reader("register('into', 1 << 20)")
                introduce(reader, owner)
                reader("prepare('read', 'owner', 'into', at, 64, 16384, b'read')", at=at)
                reader.send("[wait('read') for _ in range(10 ** 9)]")
                assert len(owner("notes(100)")[reader.name]) >= 100
                os.kill(reader.process.pid, signal.SIGKILL)
                reader.process.wait()
            owner("time.sleep(0.3), agent.get_new_notifs()")
            counts.append(owner("(len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task')))"))
        assert counts[-1] == counts[0], counts


def test_descriptors_and_threads_of_a_reader_do_not_grow_with_agents_that_come_and_go() -> None:
    with agents("reader") as (reader,):
        reader("register('into', 1 << 20)")
        counts = []
        for number in range(ROUNDS):
            with agents("owner") as (owner,):
                ready(owner, reader, number)
                assert reader("wait('read')") == "DONE", reader.said()
                assert reader("equals('into', seed, 64, 16384, 1 << 20)", seed=number)
                reader("agent.release_xfer_handle(handles.pop('read')), agent.remove_remote_agent('owner')")
            reader("time.sleep(0.3)")
            counts.append(reader("(len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task')))"))
        assert counts[-1] == counts[0], counts


@pytest.mark.parametrize("path", PATHS)
def test_releases_at_any_moment_leave_no_late_byte(path: str) -> None:
    with agents("owner", "reader", KVLINK_TRANSPORTS=path) as (owner, reader):
        owner("register('pool', 1 << 20, 7)")
        at = owner("memory['pool'].ctypes.data")
        reader("register('into', 1 << 20)")
        introduce(reader, owner)
        late = reader(
            "sum((prepare('read', 'owner', 'into', at, 64, 16384), agent.transfer(handles['read']),"
            " [None for _ in range(n * 37 % 1000)], agent.release_xfer_handle(handles.pop('read')),"
            " memory['into'].fill(0), [None for _ in range(2000)], int(memory['into'].any()))[-1]"
            " for n in range(rounds))",
            at=at,
            rounds=100 * ROUNDS,
        )
        assert late == 0
