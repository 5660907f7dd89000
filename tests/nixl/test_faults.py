# SPDX-License-Identifier: Apache-2.0
"""Agents that are killed, stopped or come and go while others read, and what that leaves behind.

KVLINK_NIXL_ROUNDS says how often.
"""

from __future__ import annotations

import operator
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from agents import Agent, agents, introduce

ROUNDS = int(os.environ.get("KVLINK_NIXL_ROUNDS", "10"))
PATHS = ["cma", "tcp"]
SEED = 56
_BEFORE = 20
"""Transfers before a fault, so that it falls anywhere into one of those that follow."""
_SETTLE_S = 20.0
_LARGE = 32 << 20
"""So large that cma reads it on a thread of its own: a post itself reads what should take half a millisecond."""

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600 + 10 * ROUNDS)]


def ready(owner: Agent, reader: Agent, seed: int) -> None:
    """Lets the reader prepare a read of 64 pieces."""
    at = owner("register('pool', 1 << 20, seed)", seed=seed)
    introduce(reader, owner)
    reader("prepare('read', owner, 'into', at, 64, 16384, b'read')", at=at, owner=owner.name)


def reads(reader: Agent, owner: Agent) -> bool:
    """Whether the owner gets this reader's notifications; readers before it may have left some."""
    notes = owner("notes(count, of)", count=_BEFORE, of=reader.name)
    return len(notes[reader.name]) >= _BEFORE


class Kept:
    """The descriptors and threads that an agent has after its first round."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.counts: tuple[int, int] | None = None

    def holds(self) -> bool:
        """Whether it has no more than those before long."""
        if self.counts is None:
            self._agent("time.sleep(1)")
            self.counts = self._agent.counts()
        until = time.monotonic() + _SETTLE_S
        while time.monotonic() < until:
            if all(map(operator.le, self._agent.counts(), self.counts)):
                return True
            self._agent("time.sleep(0.01), agent.get_new_notifs()")
        return False


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
                assert reads(reader, owner)
                owner.process.signal(signal.SIGKILL)
                _, end, _ = reader.answer()
                assert end not in ("DONE", "PROC"), reader.said()


@pytest.mark.parametrize("path", PATHS)
def test_a_reader_that_is_killed_leaves_nothing_at_its_owner(path: str) -> None:
    with agents("owner", KVLINK_TRANSPORTS=path) as (owner,):
        at = owner("register('pool', 1 << 20, 7)")
        kept = Kept(owner)
        for number in range(ROUNDS):
            with agents(f"reader{number}", KVLINK_TRANSPORTS=path) as (reader,):
                reader("register('into', 1 << 20)")
                introduce(reader, owner)
                reader("prepare('read', 'owner', 'into', at, 64, 16384, b'read')", at=at)
                reader.send("[wait('read') for _ in range(10 ** 9)]")
                assert reads(reader, owner)
                reader.process.signal(signal.SIGKILL)
                reader.process.wait()
            assert kept.holds(), (number, kept.counts, owner.counts())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("side", ["owner", "reader"])
def test_an_end_that_is_stopped_again_and_again(path: str, side: str) -> None:
    """Stops shorter and longer than the deadline: each read ends, with the right bytes or as failed."""
    chosen, stops = random.Random(SEED), 0
    with agents("owner", "reader", KVLINK_TRANSPORTS=path, KVLINK_NIXL_TIMEOUT_MS="100") as both:
        owner, reader = both
        stopped = reader if side == "reader" else owner
        reader("register('into', 1 << 20)")
        ready(owner, reader, 7)
        reader.send("read_on('read', 'into', 7, times)", times=100 * ROUNDS)
        while not reader.has_answered(chosen.uniform(0, 0.02)):
            stopped.process.signal(signal.SIGSTOP)
            time.sleep(chosen.choice((0.001, 0.01, 0.15)))
            stopped.process.signal(signal.SIGCONT)
            stops += 1
        ends = reader.answer()
        print(f"{path}, {side} stopped {stops} times: {ends}")
        assert ends["wrong"] == ends.get("PROC", 0) == 0, (ends, reader.said())
        assert stops > 0
        assert ends["DONE"] > 10 * ROUNDS, (ends, reader.said())
        assert reader("read_on('read', 'into', 7, 1)") == {"DONE": 1, "wrong": 0}, reader.said()


def test_descriptors_and_threads_of_a_reader_do_not_grow_with_agents_that_come_and_go() -> None:
    with agents("reader") as (reader,):
        reader("register('into', 1 << 20)")
        kept = Kept(reader)
        for number in range(ROUNDS):
            with agents("owner") as (owner,):
                ready(owner, reader, number)
                assert reader("wait('read')") == "DONE", reader.said()
                assert reader("equals('into', seed, 64, 16384, 1 << 20)", seed=number)
                reader("agent.release_xfer_handle(handles.pop('read')), agent.remove_remote_agent('owner')")
            assert kept.holds(), (number, kept.counts, reader.counts())


@pytest.mark.parametrize("path", PATHS)
def test_releases_at_any_moment_leave_no_late_byte(path: str) -> None:
    with agents("owner", "reader", KVLINK_TRANSPORTS=path) as (owner, reader):
        at = owner("register('pool', size, 7)", size=_LARGE)
        introduce(reader, owner)
        early, late = reader(
            "release_early('owner', at, size, times, seed)", at=at, size=_LARGE, times=100 * ROUNDS, seed=SEED
        )
        print(f"{path}: of {100 * ROUNDS} releases at least {early} were early, {late} saw a late byte")
        assert early > ROUNDS, reader.said()
        assert late == 0
