# SPDX-License-Identifier: Apache-2.0
"""A path that fails its work is left for the next transport, and a better one is looked for beside the pulls."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import virtual_time

from kvlink.errors import PeerUnreachable
from kvlink.transfer.path_memory import PathMemory, pause_s
from kvlink.transfer.peer import Peer, Refusals
from kvlink.transfer.peers import Peers

KEY = ("owner", 7)


@pytest.mark.parametrize(
    ("ends", "given_up"),
    [
        ([(0, 1)], True),
        ([(5, 1)], False),
        ([(5, 1), (0, 1)], False),
        ([(5, 1), (0, 1), (0, 2)], True),
        ([(5, 1), (0, 1), (1, 1), (0, 1)], False),
        ([(0, 0)], False),
    ],
    ids=["never worked", "worked", "worked and failed", "failed twice", "worked between", "was idle"],
)
def test_a_path_is_given_up_when_its_payload_fails(ends: list[tuple[int, int]], given_up: bool) -> None:
    memory = PathMemory()
    for valid, failed in ends:
        memory.ended("owner", "verbs", valid, failed, now=100.0)
    assert bool(memory.given_up("owner", "verbs", now=100.0)) is given_up
    assert memory.num_given_up == given_up
    assert memory.given_up("owner", "tcp", now=100.0) == ""


def test_a_path_that_never_works_is_tried_less_and_less() -> None:
    memory, now, pauses = PathMemory(), 0.0, []
    for _ in range(8):
        memory.ended("owner", "verbs", 0, 1, now)
        began = now
        while memory.given_up("owner", "verbs", now):
            now += 1.0
        pauses.append(now - began)
    assert pauses == [10, 20, 40, 80, 160, 300, 300, 300] == [pause_s(number) for number in range(8)]
    memory.ended("owner", "verbs", 1, 1, now)
    for _ in range(2):
        memory.ended("owner", "verbs", 0, 1, now)
    assert not memory.given_up("owner", "verbs", now + 10.0), "it worked, so the pauses begin anew"


def test_what_was_given_up_is_refused_by_name_unless_nothing_else_is_left() -> None:
    peers = Peers(cast(Any, SimpleNamespace(path_stats=SimpleNamespace())), cast(Any, None))
    peers.memory.ended("owner", "verbs", 0, 1, now=1e12)
    candidates = cast(Any, [("verbs", None), ("tcp", None)])
    refusals = Refusals("owner")
    assert peers._put_off("owner", candidates, refusals) == (candidates[1:], True)
    assert "failed without one whole pull" in refusals.rows[0].reason
    assert peers._put_off("owner", candidates[:1], refusals) == (candidates[:1], False)


class _Connection:
    def __init__(self, num_missing: int) -> None:
        self.num_missing, self.broken, self.closed = num_missing, False, False

    def close(self) -> None:
        self.closed = True


def peer(transport: str, num_missing: int = 0, *, is_fallback: bool = False) -> Peer:
    made = Peer.__new__(Peer)
    made.transport, made.is_fallback = transport, is_fallback
    made.connection = cast(Any, _Connection(num_missing))
    return made


class Looks(Peers):
    """Peers whose looks for a better path find what is in `found`, one after the other."""

    def script(self, current: Peer, found: list[Peer | PeerUnreachable]) -> None:
        self._peers[KEY] = current
        self.found, self.times = found, []

    async def _open(self, *_: Any, better_than: Peer | None = None, **__: Any) -> Peer | None:
        assert better_than is self._peers[KEY], "pulls go on over it"
        clock = asyncio.get_running_loop().time
        self.times.append(clock())
        one = self.found.pop(0)
        if isinstance(one, PeerUnreachable):
            raise one
        return one

    def _replace(self, key: tuple[str, int], new: Peer) -> None:
        self._peers[key] = new


def looks() -> Looks:
    return Looks(cast(Any, SimpleNamespace(path_stats=SimpleNamespace())), cast(Any, None))


def test_lanes_that_were_missing_are_looked_for_beside_the_connection() -> None:
    peers, whole, no_better = looks(), peer("verbs"), peer("verbs", 4)
    peers.script(peer("verbs", 4), [PeerUnreachable("still not"), no_better, whole])
    virtual_time.run(lambda: peers._improve(KEY, "agent"))
    assert peers._peers[KEY] is whole
    assert peers.times == [10, 30, 70]
    assert cast(Any, no_better.connection).closed
    assert not cast(Any, whole.connection).closed


def test_a_better_transport_replaces_a_fallback_and_the_looks_end() -> None:
    peers, better = looks(), peer("verbs")
    peers.script(peer("tcp", is_fallback=True), [better])
    virtual_time.run(lambda: peers._improve(KEY, "agent"))
    assert (peers._peers[KEY], peers.times) == (better, [10])
