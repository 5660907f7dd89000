# SPDX-License-Identifier: Apache-2.0
"""Requests that move to another process while they generate give the tokens of one process."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import recent_transformers  # noqa: F401
from batching_peer import BatchingProcess, end_all
from transports.processes import eventually

pytestmark = [pytest.mark.verify, pytest.mark.timeout(300)]  # several processes import torch

BLOCK, ROW_BYTES = 16, 4 * 2 * 4 * 64 * 4  # of one token: layers, K and V, heads, dimension, float32
NUM_NEW = 120
MOVED_AFTER = 40  # tokens
_numbers = iter(range(10**6))


class Peers:
    """`plain` knows nothing of kvlink and says what the tokens are."""

    def __init__(self) -> None:
        self.plain = BatchingProcess()
        self.one = BatchingProcess("one")
        self.other = BatchingProcess("other", page_size=BLOCK // 2, num_blocks=128)

    def close(self) -> None:
        end_all(*vars(self).values())


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.close()


@pytest.fixture(autouse=True)
def all_blocks_come_back(peers: Peers) -> Iterator[None]:
    yield
    for peer in (peers.one, peers.other):
        eventually(lambda peer=peer: peer.call("used") == 0)
        assert peer.call("stats")["held_tables"] == 0


class Chat:
    """A request that generates at `at`."""

    def __init__(self, peers: Peers, num_tokens: int, num_new: int = NUM_NEW) -> None:
        self.name, self.num_new = f"chat-{next(_numbers)}", num_new
        self.prompt = random.Random(self.name).choices(range(256), k=num_tokens)
        options = {"prompt": self.prompt, "request_id": self.name, "max_new_tokens": num_new}
        self.expected: list[int] = peers.plain.call("generate", **options)
        self.at = peers.one
        self.at.call("generate_on", **options)

    def wait(self, count: int = MOVED_AFTER) -> None:
        self.at.call("wait_for_tokens", request_id=self.name, count=count)

    def move(self, to: BatchingProcess, *, copies: int = 0) -> str:
        """Returns the handoff, which is submitted under another name."""
        for _ in range(copies):
            to.call("fetch", prefix=self.at.call("share", source=self.name))
        handoff: str = self.at.call("move", request_id=self.name)
        assert "was moved" in self.at.call("error", request_id=self.name)
        self.submit(handoff, to)
        return handoff

    def submit(self, handoff: str, to: BatchingProcess) -> None:
        self.name = f"{self.name}+"
        to.call("submit", handoff=handoff, request_id=self.name, max_new_tokens=self.num_new)
        self.at = to

    def tokens(self) -> list[int]:
        tokens: list[int] = self.at.call("tokens", request_id=self.name)
        return tokens


def gained(peer: BatchingProcess, before: dict[str, int]) -> dict[str, int]:
    after = peer.call("stats")
    return {name: after[name] - before[name] for name in before if after[name] != before[name]}


@pytest.mark.parametrize("num_tokens", [1, BLOCK, 3 * BLOCK + 5])
def test_a_moved_request_generates_the_same_tokens(peers: Peers, num_tokens: int) -> None:
    before = peers.other.call("stats")
    chat = Chat(peers, num_tokens)
    chat.wait()
    stored = len(json.loads(chat.move(peers.other))["prompt"])
    assert chat.tokens() == chat.expected
    assert gained(peers.other, before) == {"pulled": 1, "pulled_bytes": stored * ROW_BYTES}


def test_what_was_copied_before_is_not_pulled_again(peers: Peers) -> None:
    chat = Chat(peers, 200)
    chat.wait()
    before = peers.other.call("stats")
    stored = len(json.loads(chat.move(peers.other, copies=2))["prompt"])
    assert chat.tokens() == chat.expected
    change = gained(peers.other, before)
    assert change["pulled"] == 1
    assert change["fetched"] in (1, 2)  # the second time there may be nothing new
    copied = change["fetched_bytes"] // ROW_BYTES
    assert copied % BLOCK == 0
    assert copied >= 200 // BLOCK * BLOCK
    assert change["pulled_bytes"] == (stored - copied) * ROW_BYTES


def test_a_request_moves_back_and_forth(peers: Peers) -> None:
    chat = Chat(peers, 30)
    for number, to in enumerate((peers.other, peers.one, peers.other)):
        chat.wait(10 * (number + 1) if number == 0 else 10)
        chat.move(to, copies=number)
    assert chat.tokens() == chat.expected


def test_wrong_blocks_change_the_tokens(peers: Peers) -> None:
    """So that equal tokens prove right blocks."""
    chat = Chat(peers, 30)
    chat.wait()
    handoff = peers.one.call("move", request_id=chat.name)
    peers.one.call("error", request_id=chat.name)
    peers.one.call("spoil", handoff=handoff)
    chat.submit(handoff, peers.other)
    assert chat.tokens() != chat.expected


def test_wrong_copies_change_the_tokens(peers: Peers) -> None:
    chat = Chat(peers, 100)
    chat.wait()
    prefix = peers.one.call("share", source=chat.name)
    peers.one.call("spoil", handoff=prefix)
    peers.other.call("fetch", prefix=prefix)
    peers.one.call("spoil", handoff=prefix)  # back: here the tokens stay right
    chat.move(peers.other)
    assert chat.tokens() != chat.expected


def test_an_offer_that_ended_is_recomputed(peers: Peers) -> None:
    chat = Chat(peers, 30)
    chat.wait()
    before = peers.other.call("stats")
    handoff = peers.one.call("move", request_id=chat.name)
    peers.one.call("error", request_id=chat.name)
    peers.one.call("abort", handoff=handoff)
    chat.submit(handoff, peers.other)
    assert chat.tokens() == chat.expected
    assert gained(peers.other, before) == {"recomputed": 1}


def test_a_source_that_dies_is_recomputed(peers: Peers) -> None:
    source = BatchingProcess("dying")
    chat = Chat(peers, 30)
    peers.one.call("tokens", request_id=chat.name)
    chat.at = source
    source.call("generate_on", prompt=chat.prompt, request_id=chat.name, max_new_tokens=NUM_NEW)
    chat.wait()
    peers.other.call("fetch", prefix=source.call("share", source=chat.name))
    handoff = source.call("move", request_id=chat.name)
    source.kill()
    chat.submit(handoff, peers.other)
    assert chat.tokens() == chat.expected


def test_a_request_that_cannot_move_goes_on(peers: Peers) -> None:
    chat = Chat(peers, 30)
    chat.wait()
    with pytest.raises(RuntimeError, match="TransferError: request nobody does not generate here"):
        peers.one.call("move", request_id="nobody")
    assert chat.tokens() == chat.expected
    with pytest.raises(RuntimeError, match="does not generate here: it has ended"):
        peers.one.call("move", request_id=chat.name)
    with pytest.raises(RuntimeError, match="does not run here"):
        peers.one.call("share", source=chat.name)


def test_the_limit_of_a_moved_request_must_be_the_one_it_had(peers: Peers) -> None:
    chat = Chat(peers, 30)
    chat.wait()
    handoff = peers.one.call("move", request_id=chat.name)
    peers.one.call("error", request_id=chat.name)
    with pytest.raises(RuntimeError, match="ConfigError: the request has generated"):
        peers.other.call("submit", handoff=handoff, max_new_tokens=5)
    forged = json.loads(handoff)
    forged["num_generated"] -= 1
    with pytest.raises(RuntimeError, match="was made for other tokens"):
        peers.other.call("submit", handoff=json.dumps(forged), max_new_tokens=NUM_NEW)
    chat.submit(handoff, peers.other)
    assert chat.tokens() == chat.expected


def test_prefixes_of_given_tokens_are_copied_once(peers: Peers) -> None:
    chat = Chat(peers, 100)
    assert chat.tokens() == chat.expected
    start = chat.prompt[: 6 * BLOCK]
    before = peers.other.call("stats")
    for _ in range(2):
        assert peers.other.call("fetch", prefix=peers.one.call("share", source=start)) == len(start)
    assert gained(peers.other, before) == {"fetched": 1, "fetched_bytes": len(start) * ROW_BYTES}
    with pytest.raises(RuntimeError, match="TransferError: no whole block of these tokens is cached here"):
        peers.one.call("share", source=[7] * 100)


def test_a_prefix_whose_offer_ended_is_an_error(peers: Peers) -> None:
    chat = Chat(peers, 100)
    assert chat.tokens() == chat.expected
    prefix = peers.one.call("share", source=chat.prompt)
    peers.one.call("abort", handoff=prefix)
    with pytest.raises(RuntimeError, match="StaleBlocks"):
        peers.other.call("fetch", prefix=prefix)


def test_without_room_nothing_is_copied_and_nobody_waits(peers: Peers) -> None:
    small = BatchingProcess("small", num_blocks=4)
    try:
        chat = Chat(peers, 100)
        assert chat.tokens() == chat.expected
        assert small.call("fetch", prefix=peers.one.call("share", source=chat.prompt)) == 0
        eventually(lambda: peers.one.call("used") == 0)
    finally:
        end_all(small)


@pytest.mark.parametrize("kind", ["sliding", "mixed"])
def test_requests_with_sliding_windows_move_without_copies(kind: str) -> None:
    options: dict[str, Any] = {"window": (kind, 24), "num_blocks": 128}
    plain, one, other = (BatchingProcess(name, **options) for name in (None, "one", "other"))
    try:
        prompt = random.Random(5).choices(range(256), k=30)
        expected = plain.call("generate", prompt=prompt, request_id="r", max_new_tokens=NUM_NEW)
        one.call("generate_on", prompt=prompt, request_id="r", max_new_tokens=NUM_NEW)
        one.call("wait_for_tokens", request_id="r", count=MOVED_AFTER)
        with pytest.raises(RuntimeError, match="ConfigError: this cache keeps no prefixes"):
            one.call("share", source="r")
        handoff = one.call("move", request_id="r")
        other.call("submit", handoff=handoff, request_id="r", max_new_tokens=NUM_NEW)
        assert other.call("tokens", request_id="r") == expected
    finally:
        end_all(plain, one, other)
