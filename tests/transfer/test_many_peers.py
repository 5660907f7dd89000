# SPDX-License-Identifier: Apache-2.0
"""Connecting to one more owner takes no longer with many, and what is broken is let go all the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvlink.transfer.path_stats import MAX_PATHS, OTHERS, AllPathStats, Path
from kvlink.transfer.peer import Peer
from kvlink.transfer.peers import Peers

MANY = 2000
MOST_LOOKS = 20


class _Connection:
    """Counts how often any of them is asked if it is broken."""

    looks = 0

    def __init__(self) -> None:
        self.is_broken = False

    @property
    def broken(self) -> bool:
        _Connection.looks += 1
        return self.is_broken


def peer(worker_id: str, transport: str = "shm") -> Peer:
    made = Peer.__new__(Peer)
    made.transport, made.card = transport, cast(Any, SimpleNamespace(worker_id=worker_id))
    made.connection = cast(Any, _Connection())
    return made


class Recorded(Peers):
    """Peers that remember which ones they let go."""

    def begin(self) -> None:
        self.retired: list[Peer] = []
        self._path_log = cast(Any, SimpleNamespace(opened=lambda _: None))

    def _retire(self, peer: Peer) -> None:
        self.retired.append(peer)

    def add(self, worker_id: str, epoch: int = 1, transport: str = "shm") -> Peer:
        made = peer(worker_id, transport)
        self._replace((worker_id, epoch), made)
        return made


@pytest.fixture
def stats() -> AllPathStats:
    return AllPathStats()


@pytest.fixture
def peers(stats: AllPathStats) -> Recorded:
    made = Recorded(cast(Any, SimpleNamespace(path_stats=stats)), cast(Any, None))
    made.begin()
    return made


def test_a_connection_looks_at_few_others(peers: Recorded) -> None:
    for number in range(MANY):
        before = _Connection.looks
        peers.add(f"owner-{number}")
        assert _Connection.looks - before <= MOST_LOOKS
    assert (len(peers.all()), peers.retired) == (MANY, [])


def test_a_path_beyond_the_bound_checks_few_others(peers: Recorded, stats: AllPathStats) -> None:
    for number in range(MANY):
        before = _Connection.looks
        stats.of_path(f"owner-{number}", "shm")
        assert _Connection.looks - before <= MOST_LOOKS
        peers.add(f"owner-{number}")
    assert len(stats.counts()) == MAX_PATHS + 1


def test_every_broken_connection_is_let_go_in_the_end(peers: Recorded) -> None:
    made = [peers.add(f"owner-{number}") for number in range(100)]
    for each in made[::2]:
        cast(Any, each.connection).is_broken = True
    for number in range(10):
        peers.add(f"later-{number}")
    assert len(peers.retired) == 50
    assert {id(each) for each in peers.retired} == {id(each) for each in made[::2]}
    assert [peers.get(f"owner-{number}", 1) for number in range(4)] == [None, made[1], None, made[3]]


def test_a_newer_epoch_replaces_the_older_ones_of_its_worker_alone(peers: Recorded) -> None:
    old, other, again = peers.add("owner", 1), peers.add("other", 1), peers.add("owner", 1)
    assert peers.retired == [old]
    newer = peers.add("owner", 2)
    assert peers.retired == [old, again]
    assert (peers.get("owner", 1), peers.get("owner", 2), peers.get("other", 1)) == (None, newer, other)
    late = peers.add("owner", 1)
    assert (peers.get("owner", 1), peers.get("owner", 2)) == (late, newer), "an older one replaces none"


def test_paths_of_connected_owners_keep_their_counts(peers: Recorded, stats: AllPathStats) -> None:
    for number in range(MAX_PATHS):
        stats.of_path(f"owner-{number}", "shm")
        peers.add(f"owner-{number}")
    stats.of_path("one-more", "shm")
    assert stats.path("one-more", "shm") == Path(OTHERS, "shm")
    broken = peers.get("owner-7", 1)
    assert broken is not None
    cast(Any, broken.connection).is_broken = True
    for _ in range(MAX_PATHS // 16):
        stats.of_path("one-more", "shm")
    assert stats.path("one-more", "shm") == Path("one-more", "shm")
    assert Path("owner-7", "shm") not in stats.counts()
    assert not peers._is_live(Path("owner-8", "tcp"))
    assert peers._is_live(Path("owner-8", "shm"))
