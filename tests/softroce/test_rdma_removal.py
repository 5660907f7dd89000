# SPDX-License-Identifier: Apache-2.0
"""A NIC's device is removed under its users and comes back: the kernel waits until they have let go of it, they find it
again by themselves, and nobody restarts. Nothing is made up: rxe tells nobody that a device goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from softroce import links
from transports.lost_time import LostTime
from transports.pairs import Pair
from transports.processes import PeerProcess, eventually

from kvlink import Pull
from kvlink.errors import KVLinkError

NewPair = Callable[..., Pair]
MANY = range(512)
APART = range(0, 1024, 2)

pytestmark = pytest.mark.usefixtures("guest_links", "no_device_open")


@pytest.fixture
def no_device_open() -> None:
    """Removing it would wait for ever for who never closes it."""
    opened = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    if any("/infiniband/uverbs" in each for each in opened):
        pytest.skip("this process has devices open, as rdma_cm leaves them: run this file by itself")


@pytest.fixture
def rails() -> Iterator[NewPair]:
    """Makes connected pairs over ports of the owner and of the reader, which is this process."""
    with ExitStack() as opened:

        def make(owner: str, reader: str, transports: str = "verbs", num_blocks: int = 1026) -> Pair:
            process = PeerProcess(KVLINK_NICS=owner, KVLINK_TRANSPORTS=transports)
            opened.callback(process.close)
            lanes = 2 * len(reader.split(","))
            pair = Pair(process, "removal", transports, num_blocks=num_blocks, nics=reader, lanes=lanes)
            opened.callback(pair.close)
            pair.works()
            return pair

        yield make


def works(pair: Pair) -> bool:
    try:
        pair.works()
    except KVLinkError:
        return False
    return True


def over(pair: Pair) -> tuple[str, tuple[str, ...]]:
    """The transport of a pull, and its ports."""
    taken = pair.pull(pair.offer(range(8)), range(8), timeout_s=30).explain()[0]
    return taken.transport, taken.nics


@pytest.mark.parametrize("leaving", ["rxe1", "rxe3"], ids=["the owner's", "the reader's"])
@pytest.mark.parametrize("how", ["removed", "down"])
def test_pulls_under_way_and_those_that_follow_end_within_a_second(
    rails: NewPair, leaving: str, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within 0.92 s (csrc/transports/verbs/liveness.h) and this machine's own delays, which are measured beside it.

    The command itself is left out: starting it takes an emulated CPU as long as the rest."""
    pair = rails("rxe1", "rxe3", num_blocks=4098)
    later = [pair.offer([3]) for _ in range(5)]
    tickets = [pair.offer(range(0, 4096, 2)) for _ in range(6)]
    pulls = [pair.start(ticket, range(2048), timeout_s=120) for ticket in tickets]  # 192 MiB: it lasts
    eventually(lambda: pulls[-1].stats.num_bytes > 0)
    with LostTime() as lost, links.lost(leaving, how) as began:
        took = [ends_in_s(pull, began, lost) for pull in pulls]
        for ticket in later:
            began = time.monotonic()
            took.append(ends_in_s(pair.start(ticket, [4097], timeout_s=60), began, lost))
    with capsys.disabled():
        print(f"\n{leaving} {how}: " + ", ".join(f"{own:.2f} (+{add:.2f})" for own, add in took) + " s")
    assert max(own for own, _ in took) < 1
    eventually(lambda: works(pair), 120)


def ends_in_s(pull: Pull, began: float, lost: LostTime) -> tuple[float, float]:
    """In failure; and what of the time was the machine's."""
    with pytest.raises(KVLinkError):
        pull.wait(60)
    took, added = time.monotonic() - began, lost.since(began)
    return took - added, added


@pytest.mark.parametrize("leaving", ["rxe1", "rxe3"], ids=["the owner's", "the reader's"])
def test_the_only_device_is_removed_and_comes_back(rails: NewPair, leaving: str) -> None:
    pair = rails("rxe1", "rxe3")
    for times in (1, 2):
        with links.removed(leaving):
            assert not works(pair)  # whose connection broke
            with pytest.raises(KVLinkError, match=f"RDMA port {leaving}:1 was removed"):
                pair.start(pair.offer([3]), [9], timeout_s=20).wait(60)
        eventually(lambda: works(pair), 120)
        assert over(pair) == ("verbs", ("rxe3:1->rxe1:1",))
        if leaving == "rxe3":
            (port,) = pair.reader.stats().ports
            assert (port.away, port.times_away) == ("", times)


@pytest.mark.parametrize("leaving", ["rxe1", "rxe3"], ids=["the owner's", "the reader's"])
def test_one_of_two_devices_is_removed_under_a_pull_which_completes(rails: NewPair, leaving: str) -> None:
    pair = rails("rxe1,rxe2", "rxe3,rxe4")
    pull = pair.start(pair.offer(APART), MANY, timeout_s=120)
    eventually(lambda: pull.stats.num_bytes > 0)
    with links.removed(leaving):
        assert pull.wait(120)
        assert pair.holds(MANY, APART)
        eventually(lambda: len(over(pair)[1]) == 1, 60)
    eventually(lambda: len(over(pair)[1]) == 2, 120)


@pytest.mark.parametrize("leaving", ["rxe1", "rxe3"], ids=["the owner's", "the reader's"])
def test_tcp_stands_in_until_the_device_is_back(rails: NewPair, leaving: str) -> None:
    pair = rails("rxe1", "rxe3", "verbs,tcp")
    with links.removed(leaving):
        started = time.monotonic()
        eventually(lambda: works(pair), 60)
        assert over(pair)[0] == "tcp"
        assert time.monotonic() - started < 30
    eventually(lambda: over(pair)[0] == "verbs", 120)
