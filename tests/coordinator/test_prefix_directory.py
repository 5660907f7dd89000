# SPDX-License-Identifier: Apache-2.0
"""The directory of prefixes, and the members that it knows."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from array import array

import pytest
from control.cards import make_card
from coordinator.chains import SCOPE, STEP, prefix, query
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlink.control.limits import Limits
from kvlink.control.values import Prefix
from kvlink.coordinator.prefix_directory import PrefixDirectory
from kvlink.coordinator.store.members import Members
from kvlink.coordinator.store.memory import MemoryStore


def found(directory: PrefixDirectory, prompt: str, **options: object) -> list[tuple[str, int]]:
    """(worker id, number of keys) of each server."""
    asked = query(prompt, **options)  # type: ignore[arg-type]
    return [(worker, each.num_keys) for worker, each in directory.find(asked, asked.most)]


def test_the_longest_prefix_is_found() -> None:
    directory = PrefixDirectory()
    for number, prompt in enumerate(("abc", "abcde", "abx", "q")):
        directory.publish(f"w{number}", 1, prefix(prompt), 0.0)
    assert found(directory, "abcdefg") == [("w1", 5)]
    assert found(directory, "abcd") == [("w1", 4)]
    assert found(directory, "abxyz") == [("w2", 3)]
    assert found(directory, "abq", most=9) == [("w0", 2), ("w1", 2), ("w2", 2)]
    assert found(directory, "xabc") == found(directory, "b") == []
    assert (directory.num_lookups, directory.num_hits) == (6, 4)


def test_what_the_reader_has_itself_is_not_found() -> None:
    directory = PrefixDirectory()
    directory.publish("other", 1, prefix("abc"), 0.0)
    directory.publish("reader", 1, prefix("abcde"), 0.0)
    assert found(directory, "abcde", worker_id="reader") == [("other", 3)]
    assert found(directory, "abcde", worker_id="reader", more_than=3) == []
    assert found(directory, "abcde", more_than=4) == [("reader", 5)]
    assert found(directory, "abcde", more_than=5) == found(directory, "abcde", more_than=2**32 - 1) == []


def test_servers_with_the_same_prefix_take_turns() -> None:
    directory = PrefixDirectory()
    for worker in ("a", "b", "c"):
        directory.publish(worker, 1, prefix("xyz"), 0.0)
    first = [found(directory, "xyz", worker_id="b")[0][0] for _ in range(4)]
    assert first == ["a", "c", "a", "c"]


def test_scopes_and_steps_are_apart() -> None:
    directory = PrefixDirectory()
    directory.publish("w", 1, prefix("abc"), 0.0)
    for other in ({"scope": bytes([1]) * 16}, {"tokens_per_key": 32}):
        assert directory.find(query("abc")._replace(**other), 1) == []  # type: ignore[arg-type]
    assert directory.find(query("abc"), 1)


def test_a_server_of_several_ranks_is_found_once_all_have_published() -> None:
    directory = PrefixDirectory()
    for rank in (2, 0, 2):
        directory.publish(f"rank-{rank}", 1, prefix("abc", "mine", rank, 3), 0.0)
        assert found(directory, "abc") == []
    directory.publish("rank-1", 1, prefix("abc", "mine", 1, 3), 0.0)
    ((worker, copy),) = directory.find(query("abcd"), 1)
    assert (worker, [ticket[-6:] for ticket in copy.tickets]) == ("rank-0", [b"rank 0", b"rank 1", b"rank 2"])
    directory.drop_worker("rank-1", 1, 9)
    assert found(directory, "abc") == []
    assert (len(directory), directory.num_bytes) == (0, 0)


def test_another_prefix_of_the_same_name_replaces_the_first() -> None:
    directory = PrefixDirectory()
    directory.publish("w", 1, prefix("abc", "turn"), 0.0)
    directory.publish("w", 1, prefix("xy", "turn"), 0.0)
    directory.publish("v", 1, prefix("xy", "turn"), 0.0)
    assert found(directory, "abc") == []
    assert found(directory, "xy", most=2) == [("w", 2), ("v", 2)]
    directory.withdraw("v", "turn")
    directory.withdraw("v", "turn")
    directory.withdraw("stranger", "turn")
    assert found(directory, "xy", most=2) == [("w", 2)]


@pytest.mark.parametrize("prompt", ["abc", "xyz"], ids=["the same keys", "other keys"])
@pytest.mark.parametrize(("rank", "of"), [(0, 2), (1, 2), (0, 3), (2, 3)])
def test_nobody_else_replaces_or_withdraws_a_rank(prompt: str, rank: int, of: int) -> None:
    directory = PrefixDirectory()
    for each in range(2):
        directory.publish(f"a{each}", 1, prefix("abc", "same", each, 2), 0.0)
    before = directory.find(query("abc"), 1)
    directory.publish("b", 1, prefix(prompt, "same", rank, of), 0.0)
    directory.withdraw("b", "same")
    directory.drop_worker("b", 1)
    assert directory.find(query("abc"), 1) == before
    directory.publish("a1", 1, prefix("xyz", "same", 1, 2), 0.0)
    assert found(directory, "abc") == [], "a rank replaces its own"
    directory.publish("a0", 1, prefix("xyz", "same", 0, 2), 0.0)
    assert found(directory, "xyz") == [("a0", 3)]


def test_a_rank_is_free_once_its_worker_is_gone() -> None:
    directory = PrefixDirectory()
    directory.publish("a0", 1, prefix("abc", "same", 0, 2), 0.0)
    directory.drop_worker("a0", 1)
    for each in range(2):
        directory.publish(f"b{each}", 1, prefix("abc", "same", each, 2), 0.0)
    assert found(directory, "abc") == [("b0", 3)]


def test_those_that_failed_are_named_only_if_there_is_no_other() -> None:
    directory = PrefixDirectory()
    directory.publish("liar", 1, prefix("abcdef"), 0.0)
    directory.publish("honest", 1, prefix("abc"), 0.0)
    assert found(directory, "abcdef") == [("liar", 6)]
    assert found(directory, "abcdef", last=("liar",)) == [("honest", 3)]
    assert found(directory, "abcdef", last=("liar",), worker_id="honest") == [("liar", 6)]
    assert found(directory, "abcdef", last=("liar",), more_than=3) == [("liar", 6)]
    assert found(directory, "abcdef", last=("liar", "honest")) == [("liar", 6)]


def test_no_number_of_copies_hides_another_servers_for_long() -> None:
    directory = PrefixDirectory()
    for number in range(200):
        directory.publish("liar", 1, prefix("abc", f"copy {number}"), 0.0)
    directory.publish("honest", 1, prefix("abc"), 0.0)
    lookups = [found(directory, "abc", last=("liar",)) for _ in range(4)]
    assert [("honest", 3)] in lookups


def test_it_ends_with_its_time_or_its_worker() -> None:
    directory = PrefixDirectory()
    directory.publish("w", 1, prefix("ab", ttl_s=5.0), 0.0)
    directory.publish("w", 1, prefix("ab", ttl_s=5.0), 3.0)
    directory.publish("v", 7, prefix("xy", ttl_s=50.0), 0.0)
    directory.expire(7.9, 9)
    assert found(directory, "ab") == [("w", 2)]
    directory.expire(8.0, 9)
    assert (found(directory, "ab"), directory.num_expired) == ([], 1)
    assert not directory.drop_worker("v", 6, 9)
    assert (found(directory, "xy"), directory.publishers()) == ([("v", 2)], [("v", 7)])
    assert not directory.drop_worker("v", 7, 9)
    assert found(directory, "xy") == []


def test_the_oldest_is_evicted_first() -> None:
    directory = PrefixDirectory()
    for prompt in ("a", "b", "c", "a"):
        directory.publish("w", 1, prefix(prompt), 0.0)
    directory.evict_oldest()
    assert [prompt for prompt in "abc" if found(directory, prompt)] == ["a", "c"]
    assert directory.num_evicted == 1


PROMPTS = st.text("ab", min_size=1, max_size=6)
WORKERS = st.sampled_from(["u", "v", "w"])
PUBLISH = st.tuples(st.just("publish"), WORKERS, PROMPTS, st.integers(1, 9))
WITHDRAW = st.tuples(st.just("withdraw"), WORKERS, PROMPTS, st.just(0))
GONE = st.tuples(st.just("gone"), WORKERS, st.just(""), st.just(0))
EVICT = st.tuples(st.just("evict"), st.just(""), st.just(""), st.just(0))


@settings(max_examples=150)
@given(st.lists(PUBLISH | WITHDRAW | GONE | EVICT, max_size=40), PROMPTS, WORKERS, st.integers(0, 3))
def test_it_finds_what_a_search_through_all_finds(
    steps: list[tuple[str, str, str, int]], asked: str, reader: str, more_than: int
) -> None:
    directory = PrefixDirectory()
    known: dict[tuple[str, str], float] = {}  # oldest first
    for at, (what, worker, prompt, ttl_s) in enumerate(steps):
        directory.expire(at, 99)
        known = {key: due for key, due in known.items() if due > at}
        if what == "publish":
            directory.publish(worker, 1, prefix(prompt, ttl_s=ttl_s), at)
            known.pop((worker, prompt), None)
            known[worker, prompt] = at + ttl_s
        elif what == "withdraw":
            directory.withdraw(worker, prompt)
            known.pop((worker, prompt), None)
        elif what == "gone":
            directory.drop_worker(worker, 1, 99)
            known = {key: due for key, due in known.items() if key[0] != worker}
        elif known:
            directory.evict_oldest()
            del known[next(iter(known))]
    assert len(directory) == len(known)
    lengths = {key: _common(key[1], asked) for key in known if key[0] != reader}
    longest = max(lengths.values(), default=0)
    best = {worker for (worker, _), length in lengths.items() if length == longest > more_than}
    answer = found(directory, asked, worker_id=reader, more_than=more_than, most=16)
    assert {worker for worker, _ in answer} == best
    assert {length for _, length in answer} <= {longest}
    check_tree(directory)
    for publisher in directory.publishers():
        directory.drop_worker(*publisher, 99)
    assert (len(directory), directory.num_bytes, directory._roots, directory._of_worker) == (0, 0, {}, {})


def check_tree(directory: PrefixDirectory) -> None:
    """Each node has the copies that pass through it, and no two nodes in a row have the same ones."""
    nodes = [node for root in directory._roots.values() for node in root.children.values()]
    for node in nodes:
        copies = {copy for of_server in node.copies.values() for copy in of_server}
        through = [
            copy for copy in directory._copies.values() if copy.keys[: node.end] == node.keys()[: node.end]
        ]
        assert copies == set(through)
        assert len(copies) == node.num_copies
        assert all(child.num_copies < node.num_copies for child in node.children.values())
        nodes += node.children.values()


def _common(a: str, b: str) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _many(number: int, shared: int, by: int) -> list[Prefix]:
    """Prefixes of 500 keys each. Groups of `by` have the first ones in common."""
    published = []
    for each in range(number):
        common, own = each // by << 20, (each + 1) << 40
        numbers = [*range(common, common + shared), *range(own, own + 500 - shared)]
        content = array("Q", numbers).tobytes()
        published.append(Prefix(str(each), 60.0, 0, 1, SCOPE, STEP, content, bytes(3_000)))
    return published


def _shapes() -> dict[str, list[Prefix]]:
    one = _many(1, 0, 1)[0]
    return {
        **{f"{shared} keys of {by} in common": _many(40, shared, by) for shared, by in SHARED},
        "each longer than the last": [
            one._replace(request_id=str(n), keys=one.keys[: 8 * n]) for n in range(1, 200)
        ],
        "each of its own scope": [
            one._replace(request_id=str(n), scope=n.to_bytes(16, "big"), keys=one.keys[:8])
            for n in range(200)
        ],
        "none with a key in common": [
            one._replace(request_id=str(n), keys=one.keys[8 * n :]) for n in range(400)
        ],
    }


SHARED = ((0, 1), (500, 2), (250, 3), (500, 40))


@pytest.mark.parametrize("shape", _shapes())
def test_it_takes_no_more_memory_than_it_counts(shape: str) -> None:
    published = [prefix._replace(ticket=b"ticket") for prefix in _shapes()[shape]]
    gc.collect()
    tracemalloc.start()
    directory = PrefixDirectory()
    for number, each in enumerate(published):
        directory.publish(f"worker-{number}", 1, each, 0.0)
    before = sum(len(each.keys) + len(each.ticket) for each in published)  # there before
    measured = tracemalloc.get_traced_memory()[0] + before
    tracemalloc.stop()
    assert measured < directory.num_bytes < 5 * measured


LEASE_S = 9.0
BEAT_S = LEASE_S / 4


@pytest.fixture
def members() -> Members:
    members = Members(LEASE_S, Limits())
    for worker_id in ("a", "b"):
        members.join(make_card(worker_id), rejoin=False, now=0.0)
    return members


def lost(members: Members, now: float, late_s: float = 0.0) -> list[str]:
    return [change.card.worker_id for change in members.expire(now, late_s)]


def test_who_is_silent_for_a_lease_is_lost(members: Members) -> None:
    assert lost(members, LEASE_S - 0.1) == []
    assert members.beat("a", 1, LEASE_S - 0.1)
    assert lost(members, LEASE_S, late_s=0.01) == ["b"]
    assert not members.beat("b", 1, LEASE_S)


def test_who_comes_late_hears_first_and_only_once(members: Members) -> None:
    now = LEASE_S + 20.0
    assert lost(members, now, late_s=20.0) == []
    assert members.next_deadline() == now + BEAT_S
    assert members.beat("a", 1, now + 0.1)
    assert lost(members, now + BEAT_S + 5.0, late_s=5.0) == ["b"]
    now += 0.1 + LEASE_S + 5.0
    assert lost(members, now, late_s=5.0) == [], "its beat made up for the first time"
    assert lost(members, now + BEAT_S) == ["a"]


def test_epochs_of_so_many_who_are_gone_are_remembered() -> None:
    members = Members(LEASE_S, Limits(remembered_epochs=1))
    for worker_id in ("a", "b", "c", "d"):
        members.join(make_card(worker_id, epoch=5), rejoin=False, now=0.0)
    for worker_id in ("a", "b"):
        members.leave(worker_id, 5)
    members.join(make_card("e"), rejoin=False, now=0.0)
    for worker_id, epoch in (("a", 1), ("b", 6)):
        assert members.join(make_card(worker_id, process=2), rejoin=False, now=0.0)[0] == epoch


@pytest.mark.verify
async def test_a_coordinator_without_a_cpu_blames_nobody() -> None:
    store = MemoryStore(lease_s=1.5)
    await store.start()
    await store.join(make_card("beats"), rejoin=False)
    await store.join(make_card("silent"), rejoin=False)
    time.sleep(1.8)  # so this loop runs nothing
    await asyncio.sleep(0)
    assert await store.beat("beats", 1)
    while len(await store.workers()) > 1:
        await asyncio.sleep(0.01)
    assert [card.worker_id for card in await store.workers()] == ["beats"]
    await store.close()
