# SPDX-License-Identifier: Apache-2.0
"""Releases, closed workers, and the threads of idle ones."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from control.processes import CoordinatorProcess
from transports.pairs import Pair
from transports.pools import PoolSpec
from transports.processes import RemoteWorker, eventually

from kvlink import Worker
from kvlink.errors import ConfigError, KVLinkError

NewPair = Callable[..., Pair]
NewOwner = Callable[..., RemoteWorker]
NewReader = Callable[..., Worker]

NOTHING: list[tuple[list[int], dict[str, Any]]] = [
    ([], {"tokens": (3, 3)}),
    ([], {"tokens": (0, 0)}),
    ([1, 2, 3], {"tokens": (2, 2)}),
    ([1, 2, 3], {"layers": (0, 0)}),
    ([1, 2, 3], {"layers": (1, 1), "tokens": (0, 2)}),
    ([], {"layers": (1, 1)}),
    ([], {}),
]


def test_of_a_connected_owner(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    pair.works()
    connected = [id(peer.connection) for peer in pair.reader.peers()]
    ticket = pair.offer([3, 9, 4], request_id="unread")
    pair.reader.release(ticket)
    assert pair.owner.fate_of("unread") == "settled"
    assert [id(peer.connection) for peer in pair.reader.peers()] == connected


def test_of_an_owner_that_nobody_has_connected_to(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    pair.reader.release(pair.offer([3, 9, 4], request_id="unread"))
    assert pair.owner.fate_of("unread") == "settled"
    assert pair.reader.peers() == []
    assert pair.reader.stats().connects.count == 0


def test_of_an_owner_whose_connection_broke(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    pair.works()
    for peer in pair.reader.peers():
        peer.connection.close()
    pair.reader.release(pair.offer([3, 9, 4], request_id="unread"))
    assert pair.owner.fate_of("unread") == "settled"


def test_of_what_has_ended_is_quiet(new_pair: NewPair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvlink")
    pair = new_pair("tcp")
    for connected in (False, True):
        settled, aborted = pair.offer([1]), pair.offer([2])
        pair.owner.do("abort", request_id=aborted.request_id)
        assert pair.owner.fate_of(aborted.request_id) == "aborted"
        pair.reader.release(settled)
        assert pair.owner.fate_of(settled.request_id) == "settled"
        later = pair.offer([1, 2])  # may have a slot of theirs
        for _ in range(3):
            pair.reader.release([settled, aborted])
        pair.pull(later, [5, 6])
        assert pair.owner.fate_of(later.request_id) == "settled"
        assert bool(pair.reader.peers()), connected
    assert caplog.records == []


def test_of_a_worker_that_restarted_is_quiet(
    new_owner: NewOwner, new_reader: NewReader, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvlink")
    owner = new_owner(PoolSpec(), transports="tcp")
    reader = new_reader(PoolSpec(), transports="tcp", ticket_keys="none")
    ticket = owner.offer([1, 2])
    reader.release(replace(ticket, epoch=ticket.epoch - 1))
    owner.offer([1], request_id="live")
    reader.release(owner.offer([2], request_id="other"))
    assert owner.fate_of("other") == "settled"
    assert owner.do("counts")["active"] == 2
    assert caplog.records == []


@pytest.mark.parametrize("connected", [False, True])
def test_every_rank_releases_its_own_seat(
    new_owner: NewOwner, new_reader: NewReader, connected: bool
) -> None:
    owners = [
        new_owner(PoolSpec(total_heads=4, tp_rank=rank, tp_size=2), transports="cma") for rank in range(2)
    ]
    readers = [
        new_reader(PoolSpec(total_heads=4, tp_rank=rank, tp_size=4), transports="cma") for rank in range(4)
    ]
    tickets = [owner.offer([1, 2], request_id="shared", readers=2) for owner in owners]
    for number, reader in enumerate(readers):
        if connected:
            reader.connect(tickets[number // 2])
        assert owners[number // 2].do("events") == []
        reader.release(tickets)
        if number % 2:
            assert owners[number // 2].fate_of("shared") == "settled"
    whole = new_reader(PoolSpec(total_heads=4), transports="cma")
    whole.release([owner.offer([1, 2], request_id="one reader") for owner in owners])
    assert [owner.fate_of("one reader") for owner in owners] == ["settled"] * 2


@pytest.mark.parametrize(("into", "ranges"), NOTHING)
def test_a_pull_of_nothing(new_pair: NewPair, into: list[int], ranges: dict[str, Any]) -> None:
    pair = new_pair("shm")
    for told_at_once in (False, True):
        pull = pair.reader.pull(pair.offer([3, 9, 4], request_id=f"unread {told_at_once}"), into, **ranges)
        assert pull.done()
        assert pull.wait(0)
        assert (pull.stats.num_bytes, pull.stats.settled) == (0, told_at_once)
        assert pull.explain() == []
        assert pair.owner.fate_of(f"unread {told_at_once}") == "settled"
        pair.works()


async def test_a_pull_of_nothing_that_is_settled_later(new_pair: NewPair) -> None:
    pair = new_pair("tcp")
    pull = pair.reader.pull(pair.offer([3, 9, 4], request_id="unread"), [], settle=False)
    assert not (await pull).settled
    pair.works()
    assert "unread" not in dict(pair.owner.do("events"))
    assert pull.settle()
    assert pair.owner.fate_of("unread") == "settled"


@pytest.fixture
def coordinator() -> Iterator[CoordinatorProcess]:
    process = CoordinatorProcess(lease_s=10)
    yield process
    process.kill()


def test_by_request_id(coordinator: CoordinatorProcess, new_pair: NewPair) -> None:
    pair = new_pair("shm", coordinator=coordinator.address)
    for number in range(2):
        pair.offer([number], request_id=f"unread {number}", publish=True)
    pair.reader.release("unread 0")
    assert pair.reader.pull("unread 1", []).done()
    for number in range(2):
        assert pair.owner.fate_of(f"unread {number}") == "settled"
    assert pair.reader.peers() == []


def test_what_cannot_be_released(
    new_owner: NewOwner, new_reader: NewReader, caplog: pytest.LogCaptureFixture
) -> None:
    owner = new_owner(PoolSpec(total_heads=4), transports="shm")
    reader = new_reader(PoolSpec(total_heads=4, tp_rank=1, tp_size=2), transports="shm")
    with pytest.raises(ConfigError, match="at least one"):
        reader.release([])
    with pytest.raises(ConfigError, match="coordinator"):
        reader.release("by id")
    alone = owner.offer([1])
    reader.release(alone)  # has no seat for it, as its owner's card will show
    eventually(lambda: "readers=2" in caplog.text)
    reader.pull(owner.offer([1], readers=2), [1], settle=False).wait(20)
    with pytest.raises(ConfigError, match="readers=2"):
        reader.release(alone)
    reader.close()
    with pytest.raises(ConfigError, match="closed"):
        reader.release(alone)


BLOCKS = range(128)  # 2 MiB


def test_closing_while_pulls_connect_or_run(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport, num_blocks=130, inline_us=0)
    pauses = random.Random(6)
    ended = {True: 0, False: 0}
    for number in range(60):
        reader = pair.another_reader(f"brief-{number}")
        ticket = pair.offer(BLOCKS)
        pull = pair.start(ticket, BLOCKS, reader)
        time.sleep(pauses.uniform(0, 0.006))
        reader.close()
        blocks = pair.blocks(reader)
        blocks[:] = 0x77
        try:
            ended[pull.wait(20)] += 1
        except KVLinkError:
            ended[False] += 1
            pair.owner.do("abort", request_id=ticket.request_id)
        time.sleep(0.001)
        assert (blocks == 0x77).all(), "a byte landed in the pool of a closed worker"
    assert ended[False] > 5
    pair.works()


def test_closing_while_threads_pull(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    pauses = random.Random(7)
    ticket = pair.offer(range(16))
    for number in range(20):
        reader = pair.another_reader(f"busy-{number}")
        reader.pull(ticket, range(16), settle=False).wait(20)
        errors: list[BaseException] = []

        def keep_pulling(reader: Worker = reader, errors: list[BaseException] = errors) -> None:
            try:
                while True:
                    reader.pull(ticket, range(16), settle=False, timeout_s=20).wait(20)
            except BaseException as raised:
                errors.append(raised)

        threads = [threading.Thread(target=keep_pulling) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(pauses.uniform(0, 0.01))
        reader.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert all(isinstance(error, KVLinkError) for error in errors), errors
        assert len(errors) == 2


_FORK = """
import os, sys, numpy as np
sys.path.insert(0, sys.argv[1])
from transports.pools import PoolSpec
from kvlink import Worker
from kvlink.errors import ConfigError
owner = Worker(PoolSpec().make(), "owner", transports=sys.argv[2])
reader = Worker(PoolSpec().make(), "reader", transports=sys.argv[2])
ticket = owner.offer("r", [1, 2, 3])
owner.pool.numpy()[:] = 7
reader.pull(ticket, [4, 5, 6], settle=False).wait()
child = os.fork()
if child == 0:
    refused = 0
    for act in (
        lambda: reader.pull(ticket, [7, 8, 9], settle=False),
        lambda: reader.pull([ticket], [7, 8, 9]),
        lambda: reader.pull("some-id", [7]),
        lambda: reader.connect(ticket),
        lambda: owner.offer("s", [1]),
        lambda: owner.abort("r"),
        lambda: owner.events(),
        lambda: owner.lease_counts(),
    ):
        try:
            act()
        except ConfigError:
            refused += 1
    reader.close()
    print("child", refused, flush=True)
    sys.exit(0)  # with all that an interpreter does when it ends
_, status = os.waitpid(child, 0)
for _ in range(20):
    reader.pool.numpy()[:] = 0
    reader.pull(ticket, [4, 5, 6], settle=False).wait(20)
    assert reader.pool.numpy().any()
reader.pull(ticket, [4, 5, 6]).wait(20)
print("parent", os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_touches_nothing_of_its_parent(transport: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _FORK, str(Path(__file__).parent.parent), transport],
        env={**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "NONE"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stdout.split("\n") == ["child 8", "parent 0", ""], ended.stderr
    assert ended.returncode == 0


_OWN = ("kvlink-progress", "kvlink-owner")
_SLEEP_S = 1.5


_LOOKS_EACH_S = 10
"""How often an owner looks for its NICs, see csrc/transports/verbs/liveness.h."""


def wake_ups() -> Counter[str]:
    """Returns how often the threads of each name gave up the CPU by themselves. Only those of C++."""
    counts: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        about = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
        if about["Name"].startswith(_OWN):
            counts[about["Name"].strip()] += int(about["voluntary_ctxt_switches"])
    return counts


def test_threads_of_connected_workers_without_work_sleep(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    pair.works()
    looks = int(_SLEEP_S * _LOOKS_EACH_S) + 1 if transport == "verbs" else 0

    def sleep() -> bool:
        before = wake_ups()
        time.sleep(_SLEEP_S)
        return not wake_ups() - before - Counter({"kvlink-owner": looks})

    eventually(sleep)
    pair.works()
