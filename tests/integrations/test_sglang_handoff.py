# SPDX-License-Identifier: Apache-2.0
"""Handoffs between SGLang's ranks: rooms, chunks that overtake others, and servers that restart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from making import making
from waiting import eventually

from kvlink.config import WorkerConfig
from kvlink.errors import ConfigError, KVLinkError
from kvlink.integrations.sglang.caches import (
    AuxRows,
    Buffers,
    Cache,
    Rank,
    grouped,
    item_layout,
    open_caches,
    page_layout,
)
from kvlink.integrations.sglang.incoming import Incoming
from kvlink.integrations.sglang.messages import Chunk, Want
from kvlink.integrations.sglang.outgoing import Outgoing, Written
from kvlink.integrations.sglang.restarts import was_restarted, with_route
from kvlink.integrations.sglang.rooms import LiveRooms

LAYERS, HEADS, HEAD_BYTES, PAGE, PAGES, SLOTS = 3, 4, 32, 16, 40, 6
STATE_BYTES = 96
ROOM = 77


class Server:
    """The memory of one rank as SGLang lists it: K and V of every layer, and one state of two layers."""

    def __init__(
        self, role: str, tp_rank: int = 0, tp_size: int = 1, *, has_states: bool = True, **config: Any
    ) -> None:
        rng = np.random.default_rng(tp_rank + (role == "prefill"))
        heads = HEADS // tp_size
        self.kv = [
            rng.integers(0, 256, (PAGES, PAGE, heads, HEAD_BYTES), np.uint8) for _ in range(2 * LAYERS)
        ]
        self.states = [rng.integers(0, 256, (SLOTS, STATE_BYTES), np.uint8) for _ in range(2)]
        rank = Rank(f"{role}{tp_rank}", "tiny", "uint8", PAGE, HEADS, tp_rank, tp_size)
        states = [("mamba", buffers_of(self.states))] if has_states else []
        self.caches = open_caches(buffers_of(self.kv), states, rank, WorkerConfig(**config))
        self.outgoing, self.incoming = Outgoing(self.caches), Incoming(self.caches)
        self.want = Want(ROOM, 0, "127.0.0.1", 1, HEADS, tp_rank, tp_size, 1, 0, False)

    def close(self) -> None:
        for cache in self.caches:
            cache.worker.close()

    def expect(self, pages: list[int], slots: list[int], num_ranks: int = 1) -> Want:
        self.incoming.expect(ROOM, np.array(pages), [np.array(slots)], num_ranks)
        return replace(self.want, generation=self.incoming.generation(ROOM))


def buffers_of(arrays: list[np.ndarray]) -> list[Buffers]:
    return grouped(
        [a.ctypes.data for a in arrays], [a.nbytes for a in arrays], [a[0].nbytes for a in arrays], "test"
    )


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    with making(Server) as start:
        yield start


def send(
    prefill: Server, wants: list[Want], pages: list[int], *, first: int = 0, tokens: int | None = None,
    last: bool = True, slots: list[int] | None = None, rank: int = 0,
) -> list[Chunk]:  # fmt: skip
    has_states = last and any(cache.component is not None for cache in prefill.caches)
    states = [np.array([0] if slots is None else slots)] if has_states else []
    written = Written(np.array(pages), tokens or len(pages) * PAGE, states, last)
    tickets = prefill.outgoing.offer(ROOM, written, wants)
    aux = (b"first token",) if last else ()
    return [
        Chunk(ROOM, want.generation, rank, first, len(pages), last, len(prefill.caches), tuple(its), aux)
        for want, its in zip(wants, tickets, strict=True)
    ]


def delivered(prefill: Server) -> bool:
    assert [problem for _, problem in prefill.outgoing.ended() if problem] == []
    return prefill.outgoing.delivered(ROOM)


def same(ours: list[np.ndarray], theirs: list[np.ndarray], here: list[int], there: list[int]) -> bool:
    return all((a[here] == b[there]).all() for a, b in zip(ours, theirs, strict=True))


def test_chunks_and_state_arrive_and_settling_them_is_the_acknowledgement(
    start: Callable[..., Server],
) -> None:
    prefill, decode = start("prefill"), start("decode")
    untouched = [plane[9:].copy() for plane in decode.kv]
    want = decode.expect([3, 1, 8, 5], [2])
    for chunk in send(prefill, [want], [10, 11], last=False):
        decode.incoming.arrived(chunk)
    assert decode.incoming.poll(ROOM) is None
    assert not delivered(prefill)
    for chunk in send(prefill, [want], [30, 12], first=2, slots=[4]):
        decode.incoming.arrived(chunk)
    assert eventually(lambda: decode.incoming.poll(ROOM)) == (b"first token",)
    eventually(lambda: delivered(prefill))
    assert same(decode.kv, prefill.kv, [3, 1, 8, 5], [10, 11, 30, 12])
    assert same(decode.states, prefill.states, [2], [4])
    assert all((plane[9:] == before).all() for plane, before in zip(decode.kv, untouched, strict=True))


@pytest.mark.verify
def test_the_last_chunk_may_overtake_another(start: Callable[..., Server]) -> None:
    prefill, decode = start("prefill"), start("decode")
    want = decode.expect([1, 2], [0])
    [early] = send(prefill, [want], [10], last=False)
    [late] = send(prefill, [want], [11], first=1)
    decode.incoming.arrived(late)
    time.sleep(0.05)
    assert decode.incoming.poll(ROOM) is None
    decode.incoming.arrived(early)
    assert eventually(lambda: decode.incoming.poll(ROOM)) == (b"first token",)
    assert same(decode.kv, prefill.kv, [1, 2], [10, 11])


def test_a_prompt_that_decode_has_cached_needs_no_page(start: Callable[..., Server]) -> None:
    prefill, decode = start("prefill"), start("decode")
    [chunk] = send(prefill, [decode.expect([], [])], [], slots=[])
    assert delivered(prefill)
    decode.incoming.arrived(chunk)
    assert decode.incoming.poll(ROOM) == (b"first token",)


@pytest.mark.parametrize(("owners", "readers"), [(1, 2), (2, 1)])
def test_ranks_of_another_degree_read_their_heads(
    start: Callable[..., Server], owners: int, readers: int
) -> None:
    prefill = [start("prefill", rank, owners, has_states=False) for rank in range(owners)]
    decode = [start("decode", rank, readers, has_states=False) for rank in range(readers)]
    wants = [rank.expect([3, 4], [], owners) for rank in decode]
    for number, owner in enumerate(prefill):
        for reader, chunk in zip(
            decode, send(owner, wants, [20, 21], tokens=PAGE + 1, rank=number), strict=True
        ):
            reader.incoming.arrived(chunk)
    for reader in decode:
        eventually(lambda reader=reader: reader.incoming.poll(ROOM))
    for owner in prefill:
        eventually(lambda owner=owner: delivered(owner))
    for plane in range(2 * LAYERS):
        ours = np.concatenate([reader.kv[plane][[3, 4]] for reader in decode], axis=2).reshape(
            -1, HEADS, HEAD_BYTES
        )
        theirs = np.concatenate([owner.kv[plane][[20, 21]] for owner in prefill], axis=2).reshape(ours.shape)
        assert (ours[: PAGE + 1] == theirs[: PAGE + 1]).all()


def test_pages_given_up_by_prefill_are_never_taken_for_valid(start: Callable[..., Server]) -> None:
    prefill, decode = start("prefill"), start("decode")
    [chunk] = send(prefill, [decode.expect([1, 2], [0])], [10, 11])
    prefill.outgoing.end(ROOM)
    for plane in prefill.kv:
        plane[[10, 11]] = 0  # another request's
    decode.incoming.arrived(chunk)
    with pytest.raises(KVLinkError, match="lease"):
        eventually(lambda: decode.incoming.poll(ROOM))
    assert list(prefill.outgoing.ended()) == []


def test_a_ticket_used_again_is_refused(start: Callable[..., Server]) -> None:
    prefill, decode = start("prefill"), start("decode")
    [chunk] = send(prefill, [decode.expect([1], [0])], [10])
    decode.incoming.arrived(chunk)
    eventually(lambda: decode.incoming.poll(ROOM))
    eventually(lambda: delivered(prefill))
    again = decode.expect([2], [0])
    decode.incoming.arrived(replace(chunk, generation=again.generation))
    with pytest.raises(KVLinkError):
        eventually(lambda: decode.incoming.poll(ROOM))


@pytest.mark.verify
def test_chunks_of_an_earlier_attempt_are_dropped(start: Callable[..., Server]) -> None:
    prefill, decode = start("prefill"), start("decode")
    [chunk] = send(prefill, [decode.expect([1], [0])], [10])
    decode.incoming.drop(ROOM)
    decode.incoming.arrived(chunk)
    decode.expect([2], [0])
    decode.incoming.arrived(chunk)
    before = [plane[[1, 2]].copy() for plane in decode.kv]
    time.sleep(0.05)
    assert decode.incoming.poll(ROOM) is None
    assert same(decode.kv, before, [1, 2], [0, 1])


@pytest.mark.verify
def test_nothing_lands_after_a_drop(start: Callable[..., Server]) -> None:
    prefill, decode = start("prefill"), start("decode")
    for round_ in range(20):
        [chunk] = send(prefill, [decode.expect(list(range(20)), [0])], list(range(20, 40)))
        decode.incoming.arrived(chunk)
        decode.incoming.drop(ROOM)
        for plane in decode.kv:
            plane[:20] = round_
        time.sleep(0.002)
        assert all((plane[:20] == round_).all() for plane in decode.kv)
        prefill.outgoing.end(ROOM)


def test_a_room_may_end_whose_settled_offers_nobody_has_looked_at(start: Callable[..., Server]) -> None:
    prefill, decode = start("prefill"), start("decode")
    [chunk] = send(prefill, [decode.expect([1], [0])], [10])
    decode.incoming.arrived(chunk)
    eventually(lambda: decode.incoming.poll(ROOM))
    worker = prefill.caches[0].worker
    eventually(lambda: worker.lease_counts().settled == 1)
    for number in range(64):  # now and then the worker looks by itself when it makes offers
        worker.offer(f"other {number}", [0])
    prefill.outgoing.end(ROOM)
    assert list(prefill.outgoing.ended()) == []


def test_a_reader_that_never_comes_costs_the_lease_and_no_more(start: Callable[..., Server]) -> None:
    prefill, decode = start("prefill", lease_s=0.05), start("decode")
    send(prefill, [decode.expect([1], [0])], [10])
    [(room, problem), *_] = eventually(lambda: list(prefill.outgoing.ended()))
    assert room == ROOM
    assert "expired" in problem


def test_more_pages_or_caches_than_decode_has_are_refused(start: Callable[..., Server]) -> None:
    prefill, decode = start("prefill"), start("decode")
    [chunk] = send(prefill, [decode.expect([1, 2], [0])], [10, 11])
    wrong = {
        "decode has 2": replace(chunk, first_page=1),
        "9 groups of caches and decode has 2": replace(chunk, num_caches=9),
        "offers 2 items": replace(chunk, num_pages=1),
    }
    for words, bad in wrong.items():
        decode.incoming.drop(ROOM)
        generation = decode.expect([1, 2], [0]).generation
        decode.incoming.arrived(replace(bad, generation=generation))
        with pytest.raises(ConfigError, match=words):
            decode.incoming.poll(ROOM)


def test_pages_that_are_written_twice_are_refused(start: Callable[..., Server]) -> None:
    prefill, decode = start("prefill"), start("decode")
    want = decode.expect([1, 2, 3], [0])
    for first, pages in ((0, [10, 11]), (1, [12])):
        [chunk] = send(prefill, [want], pages, first=first, last=False)
        decode.incoming.arrived(chunk)
    with pytest.raises(ConfigError, match="prefill rank 0 wrote pages 1 to 2 twice"):
        decode.incoming.poll(ROOM)


@pytest.mark.parametrize(
    ("without", "reason"),
    [("state", "nothing of cache 1"), ("ticket", r"offered \[1\] of 2 pages of cache 0")],
)
def test_bytes_that_nobody_offered_are_missed(
    start: Callable[..., Server], without: str, reason: str
) -> None:
    """Decode went on with whatever was in its memory."""
    prefill, decode = start("prefill"), start("decode")
    want = decode.expect([1, 2], [0])
    [early] = send(prefill, [want], [10], last=False)
    [late] = send(prefill, [want], [11], first=1, slots=[] if without == "state" else None)
    decode.incoming.arrived(replace(early, tickets=()) if without == "ticket" else early)
    decode.incoming.arrived(late)
    with pytest.raises(ConfigError, match=reason):
        eventually(lambda: decode.incoming.poll(ROOM))


def test_states_are_read_by_ranks_of_the_same_degree_only() -> None:
    alone, of_two = (Rank("r", "m", "d", PAGE, HEADS, 0, tp_size) for tp_size in (1, 2))
    state = Buffers((64,), (6400,), 100)
    assert item_layout(state, alone, "swa").difference(item_layout(state, of_two, "swa")) == (
        "dtype differs: 'swa of tp_size 1' here, 'swa of tp_size 2' there"
    )


def test_another_model_is_named_before_a_byte_is_read(start: Callable[..., Server]) -> None:
    prefill, decode = start("prefill"), start("decode")
    [layout] = [cache.worker.pool.layout for cache in prefill.caches if cache.component is None]
    assert layout.difference(replace(layout, model="other")) == "model differs: 'tiny' here, 'other' there"
    too_few = start("decode", 0, 1)
    caches = [Cache(None, too_few.caches[1].worker)]
    incoming = Incoming(caches)
    incoming.expect(ROOM, np.array([1]), [], 1)
    [chunk] = send(prefill, [replace(decode.want, generation=incoming.generation(ROOM))], [3])
    chunk = replace(chunk, num_caches=1, tickets=chunk.tickets[:1])
    incoming.arrived(chunk)
    with pytest.raises(KVLinkError, match="differs"):
        eventually(lambda: incoming.poll(ROOM))


def test_buffers_that_no_memory_can_have_are_named() -> None:
    with pytest.raises(ConfigError, match="KV cache: SGLang lists 1 addresses, 1 lengths, 2 item lengths"):
        grouped([64], [64], [1, 2], "KV cache")
    with pytest.raises(ConfigError, match="does not consist of items of 128 bytes"):
        grouped([64], [64], [128], "KV cache")
    with pytest.raises(ConfigError, match="100 bytes are not 16 tokens of 4 heads"):
        page_layout(Buffers((64,), (6400,), 100), Rank("r", "m", "d", PAGE, HEADS, 0, 1))


def test_metadata_rows_are_copied_and_compared() -> None:
    ours, theirs = np.zeros((3, 8), np.uint8), np.arange(24, dtype=np.uint8).reshape(3, 8)
    AuxRows([ours.ctypes.data], [8]).write(1, AuxRows([theirs.ctypes.data], [8]).read(2))
    assert ours.tolist() == [[0] * 8, [16, 17, 18, 19, 20, 21, 22, 23], [0] * 8]
    with pytest.raises(ConfigError, match=r"rows of \[4\] bytes, decode has \[8\]"):
        AuxRows([ours.ctypes.data], [8]).write(0, [b"four"])


class Request:
    pass


def test_the_later_of_two_is_refused_until_the_first_has_ended() -> None:
    rooms, first, second = LiveRooms(), Request(), Request()
    assert rooms.assign(ROOM, first) == ""
    assert rooms.assign(ROOM, first) == ""
    assert f"bootstrap_room {ROOM}" in rooms.assign(ROOM, second)
    assert rooms.owner(ROOM) is first
    rooms.release(ROOM, second)
    assert rooms.assign(ROOM, second) != ""
    assert rooms.assign(ROOM + 1, second) == ""
    rooms.release(ROOM, first)
    assert rooms.assign(ROOM, second) == ""


def test_an_owner_that_is_gone_has_given_its_room_back() -> None:
    rooms, first, second = LiveRooms(), Request(), Request()
    rooms.assign(ROOM, first)
    del first
    assert rooms.assign(ROOM, second) == ""


def test_a_room_that_is_live_has_one_request(start: Callable[..., Server]) -> None:
    """Two prefill servers got one room: the later request is refused, the first gets its own pages."""
    first, second, decode = start("prefill"), start("prefill", lease_s=0.05), start("decode")
    before = [plane[[8, 9]].copy() for plane in decode.kv]
    want = decode.expect([0, 1], [0])
    with pytest.raises(ConfigError, match="another one for each request"):
        decode.expect([8, 9], [1])
    [foreign] = send(second, [replace(want, generation=want.generation ^ 1)], [3, 4])
    decode.incoming.arrived(foreign)
    assert decode.incoming.poll(ROOM) is None
    [chunk] = send(first, [want], [10, 11])
    decode.incoming.arrived(chunk)
    assert eventually(lambda: decode.incoming.poll(ROOM)) == (b"first token",)
    assert same(decode.kv, first.kv, [0, 1], [10, 11])
    assert same(decode.kv, before, [8, 9], [0, 1])


def test_a_room_that_has_ended_is_free_and_its_pulls_have_stopped(start: Callable[..., Server]) -> None:
    prefill, decode = start("prefill"), start("decode")
    [chunk] = send(prefill, [decode.expect([1], [0])], [10])
    decode.incoming.arrived(chunk)
    eventually(lambda: decode.incoming.poll(ROOM))
    again = decode.expect([2], [0])
    assert decode.incoming.poll(ROOM) is None
    prefill.outgoing.end(ROOM)
    [chunk] = send(prefill, [again], [11])
    decode.incoming.arrived(chunk)
    assert eventually(lambda: decode.incoming.poll(ROOM)) == (b"first token",)
    assert same(decode.kv, prefill.kv, [2], [11])


ADDRESS = "10.0.0.1:8998"
RANKS = {0: ("10.0.0.1", 7000), 1: ("10.0.0.2", 7001)}


class Session:
    """Answers for a bootstrap server whose ranks of data rank 0 are these."""

    def __init__(self, ranks: dict[int, tuple[str, int]]) -> None:
        self.ranks = ranks
        self.asked: list[str] = []

    def get(self, url: str, timeout: Any) -> Any:
        self.asked.append(url)
        rank = int(url.partition("target_tp_rank=")[2].partition("&")[0])
        if rank not in self.ranks:
            return SimpleNamespace(status_code=503, json=dict)
        ip, port = self.ranks[rank]
        return SimpleNamespace(status_code=200, json=lambda: {"rank_ip": ip, "rank_port": port})


def known() -> list[dict[str, Any]]:
    infos = [
        with_route({"rank_ip": ip, "rank_port": str(port)}, (0, 0, rank, 0))
        for rank, (ip, port) in RANKS.items()
    ]
    return [info for info in infos if info is not None]


@pytest.mark.parametrize(
    ("ranks", "restarted"),
    [
        (RANKS, False),
        (RANKS | {1: ("10.0.0.2", 7002)}, True),
        (RANKS | {0: ("10.0.0.3", 7000)}, True),
        ({}, True),
    ],
    ids=["the same", "another port", "another host", "not registered yet"],
)
def test_other_ranks_at_one_address_are_another_server(
    ranks: dict[int, tuple[str, int]], restarted: bool
) -> None:
    session = Session(ranks)
    assert was_restarted(session, ADDRESS, known()) is restarted
    assert session.asked[0] == (
        f"http://{ADDRESS}/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"
    )


def test_a_server_of_which_nothing_is_known_is_not_asked() -> None:
    session = Session({})
    assert with_route(None, (0, 0, 0, 0)) is None
    assert not was_restarted(session, ADDRESS, [])
    assert not session.asked
