# SPDX-License-Identifier: Apache-2.0
"""Both sides of LMCache's transfer channel in one process, over real workers; LMCache and its sockets are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from lmcache_servers import NUM_PAGES, PAGE, Server, asking
from lmcache_servers import result as named_result
from waiting import eventually

from kvlink.errors import KVLinkError, PeerUnreachable, TransferError
from kvlink.integrations.lmcache import pages as pages_module
from kvlink.integrations.lmcache.messages import Answer
from kvlink.integrations.lmcache.pages import Object, Pages, Wanted
from kvlink.integrations.lmcache.reads import Reads
from kvlink.ticket import Ticket

THEIRS: list[Object] = [(0, 3 * PAGE), (10 * PAGE, PAGE), (20 * PAGE, 2 * PAGE - 100)]
OURS: list[Object] = [(40 * PAGE, 3 * PAGE), (2 * PAGE, PAGE), (5 * PAGE, 2 * PAGE - 100)]


def ticket_of(answer: bytes) -> Ticket:
    ticket = Answer.from_bytes(answer, "the owner", 3).ticket
    assert ticket is not None
    return ticket


def result(reads: Reads, theirs: list[Object], ours: list[Object]) -> list[bool]:
    return named_result(reads, [Wanted(*each) for each in theirs], ours)


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def started(*args: object, **kwargs: object) -> Server:
        servers.append(Server(*args, **kwargs))  # type: ignore[arg-type]
        return servers[-1]

    yield started
    for server in servers:
        server.close()


def test_objects_arrive_whole_and_nothing_else_is_written(start: Callable[..., Server]) -> None:
    owner, reader = start("owner"), start("the reader")
    expected = reader.memory.copy()
    for (offset, size), theirs in zip(OURS, THEIRS, strict=True):
        whole = -(-size // PAGE) * PAGE
        expected[offset : offset + whole] = owner.memory[theirs[0] : theirs[0] + whole]
    assert result(reader.reads_from(asking(owner)), THEIRS, OURS) == [True] * 3
    assert np.array_equal(reader.memory, expected)
    eventually(lambda: not owner.worker.offers.events() and not len(owner.worker.offers))


def test_an_object_that_is_read_twice_lies_at_both_places(start: Callable[..., Server]) -> None:
    owner, reader = start("owner"), start("the reader")
    theirs = [(PAGE, PAGE), (0, PAGE), (PAGE, PAGE)]
    ours = [(30 * PAGE, PAGE), (31 * PAGE, PAGE), (32 * PAGE, PAGE)]
    assert result(reader.reads_from(asking(owner)), theirs, ours) == [True] * 3
    assert [reader.bytes_of(each) for each in ours] == [owner.bytes_of(each) for each in theirs]


def test_a_long_read_takes_several_leases(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "MAX_BLOCKS", 3)
    owner, reader = start("owner"), start("the reader")
    asks: list[bytes] = []

    def counted(message: bytes, timeout_s: float) -> bytes:
        asks.append(message)
        return owner.grants.answer(message)

    assert result(reader.reads_from(counted), THEIRS, OURS) == [True] * 3
    assert len(asks) == 2
    assert [reader.bytes_of(each) for each in OURS] == [owner.bytes_of(each) for each in THEIRS]
    assert result(reader.reads[0], [(0, 4 * PAGE)], [(0, 4 * PAGE)]) == [False]


def test_a_lease_that_ended_before_the_bytes_were_validated(start: Callable[..., Server]) -> None:
    """The owner may have given the memory to another object by then."""
    owner, reader = start("owner"), start("the reader")

    def too_late(message: bytes, timeout_s: float) -> bytes:
        answer = owner.grants.answer(message)
        owner.worker.abort(ticket_of(answer).request_id)
        return answer

    assert result(reader.reads_from(too_late), THEIRS, OURS) == [False] * 3


def test_one_of_several_leases_fails_alone(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "MAX_BLOCKS", 3)
    owner, reader = start("owner"), start("the reader")
    asks: list[bytes] = []

    def second_refused(message: bytes, timeout_s: float) -> bytes:
        asks.append(message)
        return owner.grants.answer(message if len(asks) == 1 else b"")

    assert result(reader.reads_from(second_refused), THEIRS, OURS) == [True, False, False]


def test_an_owner_that_is_gone_and_its_successor(start: Callable[..., Server]) -> None:
    first, reader = start("owner"), start("the reader")
    owners: list[Server] = [first]

    def ask(message: bytes, timeout_s: float) -> bytes:
        if not owners:
            raise PeerUnreachable("nobody answers")
        return owners[0].grants.answer(message)

    reads = reader.reads_from(ask)
    assert result(reads, THEIRS, OURS) == [True] * 3
    owners.clear()
    first.close()
    assert result(reads, THEIRS, OURS) == [False] * 3
    owners.append(start("owner"))
    owners[0].memory[:] = 7
    assert result(reads, THEIRS, OURS) == [True] * 3
    assert set(reader.bytes_of(OURS[0])) == {7}


@pytest.mark.parametrize(
    "theirs", [(NUM_PAGES * PAGE, PAGE), ((NUM_PAGES - 1) * PAGE, 2 * PAGE), (1, PAGE), (-PAGE, PAGE)]
)
def test_what_is_no_object_of_the_owner_is_refused(start: Callable[..., Server], theirs: Object) -> None:
    owner, reader = start("owner"), start("the reader")
    ours = (0, theirs[1])
    assert result(reader.reads_from(asking(owner)), [theirs], [ours]) == [False]
    assert not len(owner.worker.offers)


def test_sizes_and_places_are_checked_before_anything_is_asked(start: Callable[..., Server]) -> None:
    reader = start("the reader")
    reads = reader.reads_from(lambda message, timeout_s: pytest.fail("was asked"))
    for theirs, ours in [
        ([(0, PAGE)], []),
        ([], [(0, PAGE)]),
        ([(0, PAGE)], [(0, 2 * PAGE)]),
        ([(0, PAGE)], [(NUM_PAGES * PAGE, PAGE)]),
        ([(-1, 0)], [(-1, 0)]),
        ([(None, PAGE)], [(0, PAGE)]),
    ]:
        task = reads.begin([Wanted(*each) for each in theirs], ours)  # type: ignore[arg-type]
        assert reads.query(task) == [False] * len(ours)


def test_an_object_that_does_not_fit_is_alone_in_that(start: Callable[..., Server]) -> None:
    owner, reader = start("owner"), start("the reader")
    reads = reader.reads_from(asking(owner))
    theirs, ours = [*THEIRS, (0, PAGE), (NUM_PAGES * PAGE, PAGE)], [*OURS, (0, 9), (50 * PAGE, PAGE)]
    assert result(reads, theirs, ours) == [True, True, True, False, False]
    assert [reader.bytes_of(each) for each in OURS] == [owner.bytes_of(each) for each in THEIRS]


@pytest.mark.parametrize("page_bytes", [PAGE, 2 * PAGE])
def test_a_greeting_says_whether_two_servers_fit_together(
    start: Callable[..., Server], page_bytes: int
) -> None:
    owner, reader = start("owner", page_bytes=page_bytes), start("the reader")
    reads = reader.reads_from(asking(owner))
    if page_bytes == PAGE:
        reads.greet(60)
    else:
        with pytest.raises(TransferError, match="--l1-align-bytes"):
            reads.greet(60)


def test_a_client_that_is_closed_reads_nothing_more(start: Callable[..., Server]) -> None:
    owner, reader = start("owner"), start("the reader")
    reads = reader.reads_from(asking(owner))
    task = reads.begin([Wanted(*each) for each in THEIRS], OURS)
    reads.close()
    reads.close()
    assert reads.query(task) == []
    assert result(reads, THEIRS, OURS) == [False] * 3
    assert not len(reader.places)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff",
        b"[]",
        b"1",
        b"{}",
        b'{"version": 4, "reader": "r", "page_bytes": 512, "objects": []}',
        b'{"version": 3, "models": {}, "owners": [], "reader": "r", "page_bytes": 512, "objects": [[0]]}',
        b'{"version": 3, "models": {}, "owners": [], "reader": "r", "page_bytes": 512, "objects": [[0.0, 512]]}',
        b'{"version": 3, "models": {}, "owners": [], "reader": "r", "page_bytes": 512, "objects": [[0, true]]}',
        b'{"version": 3, "models": {}, "owners": [], "reader": "r", "page_bytes": 512, "objects": [[0, 512], [0, 2]]}',
        b'{"version": 3, "models": {}, "owners": [], "reader": "r", "page_bytes": 512, "objects": [[0, 1e400]]}',
        b'{"version": 3, "models": {}, "owners": [], "reader": 7, "page_bytes": 512, "objects": [[0, 512]]}',
        b'{"version": 3, "models": {}, "owners": [], "reader": "", "page_bytes": 512, "objects": [[0, 512]]}',
        b"[" * 100_000,
    ],
)
def test_what_no_reader_sends_is_refused(start: Callable[..., Server], message: bytes) -> None:
    owner = start("owner")
    assert owner.grants.answer(message).startswith(b"!")
    assert not len(owner.worker.offers)


def test_memory_without_a_page_is_refused() -> None:
    with pytest.raises(KVLinkError, match="--l1-size-gb"):
        Pages(PAGE, PAGE - 1).pool(1)
