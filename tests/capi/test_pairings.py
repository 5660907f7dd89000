# SPDX-License-Identifier: Apache-2.0
"""Two processes, of which at least one is in C: the right bytes, and the right end of what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from capi.node import (
    BLOCKS,
    BUFFER,
    CANCELLED,
    CONFIG,
    DENIED,
    ENDED,
    FOR_EVER,
    HANDLE,
    KEY,
    NO_SETTLE,
    NOTIFY,
    OFFER_ENDED,
    OK,
    PENDING,
    PULL_ENDED,
    REPLY,
    STALE,
    TIMEOUT,
    UNREACHABLE,
    CodeError,
    COwner,
    Event,
    Node,
    PythonOwner,
    connect,
    contents,
    dial,
    layout,
)
from waiting import eventually

from kvlink import BlockPool, Ticket, Worker, WorkerConfig
from kvlink.control.codec import CARD
from kvlink.errors import PeerUnreachable, StaleBlocks

pytestmark = pytest.mark.verify

PATHS = [("shm", "alloc"), ("cma", "wrap"), ("tcp", "wrap")]
FAST = PATHS[0]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> WorkerConfig:
    """That of workers in Python, with the key that those in C have."""
    keys: Path = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY + "\n")
    keys.chmod(0o600)
    return WorkerConfig.from_env(ticket_keys=str(keys))


@pytest.fixture(params=PATHS, ids=lambda path: path[0])
def path(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A transport, and the kind of memory that an owner in C has."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=["C", "Python"])
def owner(
    request: pytest.FixtureRequest, path: tuple[str, str], config: WorkerConfig
) -> Iterator[COwner | PythonOwner]:
    """An owner of either kind."""
    made: COwner | PythonOwner
    if request.param == "C":
        made = COwner(*path, with_agent=False, channel_port=0)
    else:
        made = PythonOwner(path[0], replace(config, channel="on"))
    with closing(made) as owner:
        yield owner


@pytest.fixture
def nodes(path: tuple[str, str]) -> Iterator[tuple[COwner, Node, int]]:
    """An owner and a reader, both in C, which is connected."""
    with (
        closing(COwner(*path, with_agent=False)) as owner,
        closing(Node("reader", path[0], memory=path[1])) as reader,
    ):
        yield owner, reader, connect(reader, owner)


def check_blocks(reader: Node, into: list[int], theirs: list[int], seed: int = 5) -> None:
    """Compares every byte of the pool: what was pulled, and the rest, which stays zero."""
    pool = reader.blocks(range(BLOCKS))
    assert (pool[:, into] == contents(seed)[:, theirs]).all()
    assert not np.delete(pool, into, axis=1).any()


@pytest.mark.parametrize("way", ["messages", "channel"])
def test_c_reads(owner: COwner | PythonOwner, path: tuple[str, str], way: str) -> None:
    with closing(Node("reader", path[0], memory=path[1])) as reader:
        peer = connect(reader, owner) if way == "messages" else dial(reader, owner.card)
        assert f": {path[0]}" in reader.do("explain", peer)
        pull = reader.pull(peer, owner.offer([3, 1, 8]), [5, 6, 7])
        reader.do("wait", pull, FOR_EVER)
        check_blocks(reader, [5, 6, 7], [3, 1, 8])
        settled, num_bytes, _, _ = reader.do("count", pull).split(",")
        assert (settled, num_bytes) == ("1", str(3 * 16384))
        assert reader.do("explain", pull).startswith("valid, settled")
        reader.pull(peer, owner.offer([9]), [2], how="now")
        eventually(lambda: owner.num_settled() == 2)


def test_python_reads_from_c(path: tuple[str, str], config: WorkerConfig) -> None:
    with closing(COwner(*path, with_agent=True)) as owner:
        pool = BlockPool.allocate(layout(), huge_pages=False)
        with Worker(pool, "python", transports=path[0], config=config) as reader:
            ticket = Ticket.from_bytes(owner.offer([3, 1, 8]))
            pull = reader.pull(ticket, [5, 6, 7])
            pull.wait(10)
            assert pull.explain()[0].transport == path[0]
            pool_bytes = pool.numpy().reshape(8, BLOCKS, -1)
            assert (pool_bytes[:, [5, 6, 7]] == contents(5)[:, [3, 1, 8]]).all()
            eventually(lambda: owner.num_settled() == 1)
            late = Ticket.from_bytes(owner.offer([4]))
            owner.kill()
            with pytest.raises((PeerUnreachable, StaleBlocks)):
                reader.pull(late, [1]).wait(10)


def test_python_reads_from_c_by_the_channel(path: tuple[str, str], config: WorkerConfig) -> None:
    with closing(COwner(*path, with_agent=False, channel_port=0)) as owner:
        pool = BlockPool.allocate(layout(), huge_pages=False)
        with Worker(pool, "python", transports=path[0], config=config) as reader:
            reader.add_card(CARD.encode(owner.card))
            pull = reader.pull(Ticket.from_bytes(owner.offer([3, 1, 8])), [5, 6, 7])
            pull.wait(10)
            assert pull.explain()[0].transport == path[0]
            pool_bytes = pool.numpy().reshape(8, BLOCKS, -1)
            assert (pool_bytes[:, [5, 6, 7]] == contents(5)[:, [3, 1, 8]]).all()
            eventually(lambda: owner.num_settled() == 1)


def test_streaming(nodes: tuple[COwner, Node, int]) -> None:
    owner, reader, peer = nodes
    offer, ticket = owner.node.offer([0, 1, 2, 3], ready=1)
    pull = reader.pull(peer, ticket, [4, 5, 6, 7], timeout_us=20_000_000)
    eventually(lambda: reader.do("count", pull).endswith(",1"))
    assert reader.refusal("wait", pull, 0) == PENDING
    owner.node.do("ready", offer, 3)
    eventually(lambda: reader.do("count", pull).endswith(",3"))
    owner.node.do("ready", offer, 4)
    reader.do("wait", pull, FOR_EVER)
    check_blocks(reader, [4, 5, 6, 7], [0, 1, 2, 3])


def test_events(nodes: tuple[COwner, Node, int]) -> None:
    owner, reader, peer = nodes
    offer, ticket = owner.node.offer([0])
    pull = int(reader.pull(peer, ticket, [1], flags=NOTIFY))
    seen: list[Event] = []
    eventually(lambda: seen.extend(reader.events()) or seen)
    assert seen == [Event(PULL_ENDED, pull, 9, OK)]
    ended: list[Event] = []
    eventually(lambda: ended.extend(owner.node.events()) or ended)
    assert ended == [Event(OFFER_ENDED, offer, 7, OK)]
    assert owner.node.refusal("extend", offer, 1000) == ENDED


def test_an_offer_that_ends_before(nodes: tuple[COwner, Node, int]) -> None:
    owner, reader, peer = nodes
    offer, ticket = owner.node.offer([0])
    owner.node.do("abort", offer)
    assert reader.refusal("now", peer, ticket.hex(), 1, 0, 0, 0, 0) == STALE
    brief, late = owner.node.offer([1], ttl_us=1000)
    ended: list[Event] = []
    eventually(lambda: ended.extend(owner.node.events()) or len(ended) == 2)
    assert [(event.handle, event.code) for event in ended] == [(offer, CANCELLED), (brief, TIMEOUT)]
    assert reader.refusal("now", peer, late.hex(), 1, 0, 0, 0, 0) == STALE


def test_deadline_and_cancel(nodes: tuple[COwner, Node, int]) -> None:
    owner, reader, peer = nodes
    _, ticket = owner.node.offer([0, 1], ready=0)
    late = reader.pull(peer, ticket, [4, 5], timeout_us=1000)
    assert reader.refusal("wait", late, FOR_EVER) == TIMEOUT
    pull = reader.pull(peer, ticket, [4, 5])
    reader.do("cancel", pull)
    assert reader.refusal("wait", pull, 0) == CANCELLED
    reader.do("close", pull)
    assert reader.refusal("wait", pull, 0) == HANDLE


def test_an_owner_that_is_killed(nodes: tuple[COwner, Node, int]) -> None:
    owner, reader, peer = nodes
    _, ticket = owner.node.offer([0, 1], ready=1)
    pull = reader.pull(peer, ticket, [4, 5])
    owner.kill()
    assert reader.refusal("wait", pull, FOR_EVER) in (UNREACHABLE, STALE)
    assert reader.refusal("now", peer, ticket.hex(), "4,5", 300_000, 0, 0, 0) in (UNREACHABLE, STALE, TIMEOUT)


def test_plans_and_seats(nodes: tuple[COwner, Node, int]) -> None:
    owner, reader, peer = nodes
    _, ticket = owner.node.offer([2, 3], readers=3)
    plan = reader.pull(peer, ticket, [0, 1], how="plan")
    reader.do("wait", reader.pull(int(plan), ticket, [], how="planned", flags=NO_SETTLE), FOR_EVER)
    check_blocks(reader, [0, 1], [2, 3])
    _, other = owner.node.offer([4, 5])
    assert reader.refusal("planned", plan, other.hex(), 0, 0, 0, 0, 0) == CONFIG
    reader.pull(peer, ticket, [0, 1], how="now", seat=1, num_readers=2)  # and so the third does not come
    reader.pull(peer, ticket, [0, 1], how="release", seat=0, num_readers=2)
    eventually(lambda: owner.num_settled() == 1)


def test_closing_a_worker_ends_what_it_has(nodes: tuple[COwner, Node, int]) -> None:
    owner, reader, peer = nodes
    _, ticket = owner.node.offer([0, 1], ready=1)
    pull = reader.pull(peer, ticket, [4, 5])
    assert reader.refusal("free") == CONFIG
    reader.do("close", 0)
    assert reader.refusal("wait", pull, FOR_EVER) == HANDLE
    assert reader.refusal("explain", peer) == HANDLE
    reader.do("free")


@pytest.mark.parametrize("keys", ["-", "x" * 40])
def test_tickets_of_others(keys: str) -> None:
    transport, memory = FAST
    with (
        closing(COwner(transport, memory, with_agent=False)) as owner,
        closing(Node("reader", transport, keys=keys)) as reader,
    ):
        peer = connect(reader, owner)
        if keys == "-":  # it checks none
            reader.pull(peer, owner.offer([0]), [1], how="now")
        else:
            assert reader.refusal("now", peer, owner.offer([0]).hex(), 1, 0, 0, 0, 0) == DENIED


def test_what_only_python_plans_is_refused_by_name() -> None:
    with (
        closing(Node("owner", "shm", tp=(1, 2))) as owner,
        closing(Node("reader", "shm", tp=(0, 2))) as reader,
        pytest.raises(CodeError, match="Python only"),
    ):
        reader.do("peer", owner.card().hex(), 0)


def test_transports_in_order(config: WorkerConfig) -> None:
    """shm does not reach memory of the program, so the next one is used, and the text says why."""
    with (
        closing(COwner("shm,tcp", "wrap", with_agent=False)) as owner,
        closing(Node("reader", "shm,tcp")) as reader,
    ):
        peer = connect(reader, owner)
        text = reader.do("explain", peer)
        assert ": tcp" in text
        assert "|not shm: " in text


def test_an_owner_that_does_not_answer() -> None:
    with closing(COwner("shm", "alloc", with_agent=False)) as owner, closing(Node("reader", "shm")) as reader:
        owner.kill()
        peer = int(reader.do("peer", owner_card(owner), 0))
        assert reader.bytes_of("step", peer, "-")
        with pytest.raises(CodeError, match="did not answer") as raised:
            reader.do("step", peer, "-")
        assert raised.value.code == UNREACHABLE


def test_an_answer_that_did_not_fit_is_kept_for_its_caller() -> None:
    """Another reader with the same message gets one of its own: cma numbers those that it admits."""
    with closing(COwner("cma", "wrap", with_agent=False)) as owner, closing(Node("reader", "cma")) as reader:
        message = reader.bytes_of("step", reader.do("peer", owner_card(owner), 0), "-")
        assert owner.node.refusal("answer", 1, message.hex(), 1) == BUFFER
        places = [REPLY.decode(owner.answer(message, caller)).replies[0][-4] for caller in (2, 1)]
        assert places == [1, 0]


def owner_card(owner: COwner) -> str:
    """The card, in hexadecimal."""
    return CARD.encode(owner.card).hex()
