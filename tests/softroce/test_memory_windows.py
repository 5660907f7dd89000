# SPDX-License-Identifier: Apache-2.0
"""Memory windows of type 2B, which kvlink does without: what they keep, what they break, and what they cost.

The kernel's soft-RoCE (6.1) checks a window's key, queue pair, rights and state, but holds a read against the
bounds of the region beneath it, not of the window: the test of the bounds asserts what each device does.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import numpy as np
import pytest

try:
    from softroce.pyverbs_peer.nic import PEERS_READ, Connection, Memory, Nic, Read, WorkRefused
    from softroce.pyverbs_peer.windows import OPENED_BY_WINDOWS, Limits, Window
except ImportError as error:
    pytest.skip(
        f"pyverbs cannot be imported ({error}): sudo apt-get install python3-pyverbs, and use the "
        "distribution's own version of Python",
        allow_module_level=True,
    )

KIB = 1024
BLOCK = 32 * KIB  # 16 tokens of one plane of Llama-70B
NUM_BLOCKS = 64
PIECES = 40_960  # of 4,096 tokens of it: 256 blocks of 160 planes
POISON = 0xA5


class ExportedBlocks:
    """An owner's memory that only windows open, and its readers', on one device. Ends with all it made."""

    def __init__(self, device: str) -> None:
        self._open = ExitStack()
        self._nic = Nic(device)
        self._open.callback(self._nic.close)
        self.limits = Limits.of(self._nic)
        self.memory = Memory(self._nic, NUM_BLOCKS * BLOCK, OPENED_BY_WINDOWS)
        self.memory.bytes[:] = np.random.default_rng(2026).integers(0, 256, NUM_BLOCKS * BLOCK, np.uint8)
        self.into = Memory(self._nic, NUM_BLOCKS * BLOCK, PEERS_READ)
        self.into.bytes[:] = POISON

    def connect(self) -> tuple[Connection, Connection]:
        """The owner's end and the reader's."""
        owner, reader = Connection(self._nic), Connection(self._nic)
        self._open.callback(owner.close)
        self._open.callback(reader.close)
        owner.connect(reader.address())
        reader.connect(owner.address())
        return owner, reader

    def window(self, block: int, num_bytes: int = BLOCK) -> Window:
        """Not bound yet."""
        window = Window(self._nic, self.memory, block * BLOCK, num_bytes)
        self._open.callback(window.close)
        return window

    def read(self, rkey: int, offset: int, num_bytes: int = BLOCK) -> Read:
        """To the same place in `into`."""
        return Read(self.into.address + offset, self.into.lkey, self.memory.address + offset, rkey, num_bytes)

    def landed(self) -> list[int]:
        """Offsets of bytes that are no longer poison."""
        return np.flatnonzero(self.into.bytes != POISON).tolist()

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def exported(device: str) -> Iterator[ExportedBlocks]:
    exported = ExportedBlocks(device)
    if not exported.limits.has_windows:
        exported.close()
        pytest.skip(f"{device} has no memory windows of type 2B")
    yield exported
    exported.close()


def refused(reader: Connection, read: Read) -> str:
    with pytest.raises(WorkRefused) as caught:
        reader.read([read])
    return str(caught.value.status)


def test_a_window_opens_one_block(exported: ExportedBlocks) -> None:
    owner, reader = exported.connect()
    window = exported.window(3)
    owner.post([window.bind])
    reader.read([exported.read(window.rkey, 3 * BLOCK)])
    block = slice(3 * BLOCK, 4 * BLOCK)
    assert np.array_equal(exported.into.bytes[block], exported.memory.bytes[block])


def test_a_window_that_nothing_binds_opens_nothing(exported: ExportedBlocks) -> None:
    _, reader = exported.connect()
    assert refused(reader, exported.read(exported.window(3).rkey, 3 * BLOCK)) == "IBV_WC_REM_ACCESS_ERR"
    assert exported.landed() == []


def test_a_revoked_window_ends_a_late_read_and_its_connection_with_it(exported: ExportedBlocks) -> None:
    """No milder than fencing: the reader's other windows die with the queue pair that was refused."""
    owner, late = exported.connect()
    revoked, other = exported.window(3), exported.window(4)
    owner.post([revoked.bind, other.bind])
    bystanders_owner, bystander = exported.connect()
    bystanders = exported.window(5)
    bystanders_owner.post([bystanders.bind])

    owner.post([revoked.revoke])
    assert refused(late, exported.read(revoked.rkey, 3 * BLOCK)) == "IBV_WC_REM_ACCESS_ERR"
    assert refused(late, exported.read(other.rkey, 4 * BLOCK)) == "IBV_WC_WR_FLUSH_ERR"
    assert exported.landed() == []
    bystander.read([exported.read(bystanders.rkey, 5 * BLOCK)])
    block = slice(5 * BLOCK, 6 * BLOCK)
    assert np.array_equal(exported.into.bytes[block], exported.memory.bytes[block])


def test_a_window_is_for_one_queue_pair(exported: ExportedBlocks) -> None:
    owner, _ = exported.connect()
    _, stranger = exported.connect()
    window = exported.window(3)
    owner.post([window.bind])
    assert refused(stranger, exported.read(window.rkey, 3 * BLOCK)) == "IBV_WC_REM_ACCESS_ERR"
    assert exported.landed() == []


def test_a_window_to_read_is_not_to_write(exported: ExportedBlocks) -> None:
    owner, reader = exported.connect()
    window = exported.window(3)
    owner.post([window.bind])
    before = exported.memory.bytes.copy()
    with pytest.raises(WorkRefused, match="IBV_WC_REM_ACCESS_ERR"):
        reader.write(exported.memory.address + 3 * BLOCK, window.rkey, 1, exported.into)
    assert np.array_equal(exported.memory.bytes, before)


@pytest.mark.parametrize("offset", [2 * BLOCK, 4 * BLOCK, 3 * BLOCK + 64], ids=["before", "behind", "across"])
def test_reads_outside_a_window(exported: ExportedBlocks, offset: int) -> None:
    owner, reader = exported.connect()
    window = exported.window(3)
    owner.post([window.bind])
    if exported.limits.is_soft_roce:
        reader.read([exported.read(window.rkey, offset)])
        span = slice(offset, offset + BLOCK)
        assert np.array_equal(exported.into.bytes[span], exported.memory.bytes[span])
    else:
        assert refused(reader, exported.read(window.rkey, offset)) == "IBV_WC_REM_ACCESS_ERR"
        assert exported.landed() == []


def test_reads_outside_the_region_of_a_window_are_refused(exported: ExportedBlocks) -> None:
    owner, reader = exported.connect()
    window = exported.window(NUM_BLOCKS - 1)
    owner.post([window.bind])
    last_block = exported.read(window.rkey, (NUM_BLOCKS - 1) * BLOCK)
    assert refused(reader, last_block._replace(remote=last_block.remote + 64)) == "IBV_WC_REM_ACCESS_ERR"
    assert exported.landed() == []


def test_a_window_reaches_no_further_than_one_region(exported: ExportedBlocks) -> None:
    owner, _ = exported.connect()
    with pytest.raises(WorkRefused, match="IBV_WC_MW_BIND_ERR"):
        owner.post([exported.window(NUM_BLOCKS - 1, 2 * BLOCK).bind])


def test_what_windows_cost(exported: ExportedBlocks, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Asserts that all windows of a chain open, and that the last is closed again; prints what that took."""
    owner, reader = exported.connect()
    costs = defaultdict[str, list[float]](list)
    for _ in range(9):
        windows = [exported.window(block) for block in range(NUM_BLOCKS)]
        costs["bind"].append(us_each(owner, [window.bind for window in windows]))
        for name, size in ("READ of 4 KiB", 4 * KIB), ("READ of 32 KiB", BLOCK):
            exported.into.bytes[:] = POISON
            reads = [exported.read(one.rkey, block * BLOCK, size) for block, one in enumerate(windows)]
            costs[name].append(us_each(reader, [read.request() for read in reads]))
        assert np.array_equal(exported.into.bytes, exported.memory.bytes)
        costs["revoke"].append(us_each(owner, [window.revoke for window in windows]))
    assert (
        refused(reader, exported.read(windows[-1].rkey, (NUM_BLOCKS - 1) * BLOCK)) == "IBV_WC_REM_ACCESS_ERR"
    )
    with capsys.disabled():
        print(f"\n{device} has at most {exported.limits.max_windows} windows; {report(costs)}")


def us_each(connection: Connection, requests: Sequence[Any]) -> float:
    started = time.perf_counter()
    connection.post(requests)
    return 1e6 * (time.perf_counter() - started) / len(requests)


def report(costs: dict[str, list[float]]) -> str:
    lines = [f"µs each in chains of {NUM_BLOCKS}: median (least to most)"]
    lines += [f"  {name:14} {median(us):8.2f} ({min(us):.2f} to {max(us):.2f})" for name, us in costs.items()]
    window_us = median(costs["bind"]) + median(costs["revoke"])
    for name in "READ of 4 KiB", "READ of 32 KiB":
        reads_us = PIECES * median(costs[name])
        lines += [
            f"  {count} windows take {count * window_us / reads_us:.3%} of {PIECES} times {name}"
            for count in (256, PIECES)
        ]
    return "\n".join(lines)
