# SPDX-License-Identifier: Apache-2.0
"""The soak finds what is planted: its own accounting, without a process."""

from __future__ import annotations

import numpy as np
import pytest
from soak.contents import (
    BLOCK_WORDS,
    MAX_OWNERS,
    MAX_REQUESTS,
    NOBODY,
    POISON,
    differences,
    of_others,
    written,
)
from soak.ledger import BAD, Excuses, Ledger, Outcome
from soak.places import Places


@pytest.mark.parametrize(("owner", "request_"), [(1, 1), (MAX_OWNERS - 1, MAX_REQUESTS - 1)])
def test_what_was_offered_is_right(owner: int, request_: int) -> None:
    seen = written(owner, request_, 3, 4)
    assert not differences(seen, owner, request_, 3)
    assert len(np.unique(seen)) == seen.size
    assert (seen != POISON).all()


def test_a_wrong_byte_is_found() -> None:
    seen = written(1, 7, 0, 2)
    seen.view(np.uint8)[1, 100] ^= 1
    assert differences(seen, 1, 7, 0)["wrong"] == 1


@pytest.mark.parametrize(
    ("theirs", "kind"),
    [
        (written(1, 8, 1, 1), "foreign"),
        (written(2, 7, 1, 1), "foreign"),
        (written(1, 7, 0, 1), "wrong"),
        (written(1, NOBODY, 1, 1), "wrong"),
        (np.full((1, BLOCK_WORDS), POISON), "wrong"),
        (np.zeros((1, BLOCK_WORDS), np.uint64), "wrong"),
    ],
    ids=["of another request", "of another owner", "of another block", "of nobody", "unwritten", "zeros"],
)
def test_a_block_of_somebody_else_is_found(theirs: np.ndarray, kind: str) -> None:
    seen = written(1, 7, 0, 2)
    seen[1:] = theirs
    assert differences(seen, 1, 7, 0)[kind] == BLOCK_WORDS


def test_words_of_others_are_counted_among_all_that_landed() -> None:
    seen = np.concatenate([written(1, 7, 0, 1), written(1, 8, 0, 2), written(1, NOBODY, 0, 1)])
    assert of_others(seen, 1, 7) == {(1, 8): 2 * BLOCK_WORDS}
    assert not of_others(seen[:0], 1, 7)
    assert not of_others(written(1, 8, 0, 1)[0, :1], 1, 7), "a word that was written in part"


def test_a_late_byte_is_found_once() -> None:
    words = np.zeros((8, BLOCK_WORDS), np.uint64)
    places = Places(words, blocks_each=4)
    first = places.take()
    assert first == 0
    words[first] = 1  # in time
    places.release(first)
    places.look_at_all()
    assert places.take_late() == 0
    words.view(np.uint8)[2, 5] = 1
    assert [places.take(), places.take()] == [4, 0]
    assert places.take() is None
    assert places.take_late() == 1
    assert places.take_late() == 0
    assert (words[:4] == POISON).all()


def test_a_late_byte_in_a_place_that_nobody_uses_again_is_found() -> None:
    words = np.zeros((8, BLOCK_WORDS), np.uint64)
    places = Places(words, blocks_each=4)
    words[7, -1] = 0
    places.look_at_all()
    assert places.take_late() == 1
    assert places.take() == 0


def counted(outcome: Outcome, excuses: Excuses) -> dict[str, int]:
    ledger = Ledger()
    ledger.pulled(Outcome(), Excuses(), "a good one")
    assert ledger.is_good
    ledger.pulled(outcome, excuses, "the one")
    assert ledger.is_good == (not any(ledger.counts[kind] for kind in BAD))
    ledger.counts["good"] -= 1
    return {kind: number for kind, number in ledger.counts.items() if number}


STALE = Outcome("StaleBlocks", "settled")


@pytest.mark.parametrize(
    ("outcome", "excuses", "counts"),
    [
        (Outcome(), Excuses(), {"good": 1}),
        (Outcome(), Excuses(may_be_stale=True), {"good": 1}),
        (Outcome(differences={"wrong": 3}), Excuses(), {"good": 1, "wrong": 1}),
        (Outcome(differences={"foreign": 3, "wrong": 0}), Excuses(), {"good": 1, "foreign": 1}),
        (STALE, Excuses(may_be_stale=True), {"stale: settled": 1}),
        (STALE, Excuses(owner_killed=True), {"stale: settled": 1}),
        (STALE, Excuses(short_deadline=True, cancelled=True), {"stale: settled": 1, "innocent": 1}),
        (
            Outcome("StaleBlocks", "aborted", transport="shm", words_of_others={(1, 8): 1024}),
            Excuses(may_be_stale=True),
            {"stale: aborted": 1, "dropped KiB of others: shm aborted": 8},
        ),
        (
            Outcome("StaleBlocks", "aborted", transport="tcp", words_of_others={(1, 8): 1024}),
            Excuses(may_be_stale=True),
            {"stale: aborted": 1, "dropped KiB of others: tcp aborted": 8, "unguarded": 1},
        ),
        (Outcome("TransferTimeout"), Excuses(short_deadline=True), {"timed out": 1}),
        (Outcome("TransferTimeout"), Excuses(may_be_stale=True), {"timed out": 1, "innocent": 1}),
        (Outcome("Cancelled"), Excuses(cancelled=True), {"cancelled": 1}),
        (Outcome("Cancelled"), Excuses(), {"cancelled": 1, "innocent": 1}),
        (Outcome("PeerUnreachable"), Excuses(owner_killed=True), {"unreachable": 1}),
        (Outcome("PeerUnreachable"), Excuses(cancelled=True), {"unreachable": 1}),
        (Outcome("PeerUnreachable"), Excuses(may_be_stale=True), {"unreachable": 1, "innocent": 1}),
        (Outcome("AccessDenied"), Excuses(owner_killed=True), {"failed: AccessDenied": 1, "innocent": 1}),
    ],
)
def test_what_may_become_of_a_pull(outcome: Outcome, excuses: Excuses, counts: dict[str, int]) -> None:
    assert counted(outcome, excuses) == counts


@pytest.mark.parametrize("kind", BAD)
def test_whatever_must_not_happen_fails_the_soak(kind: str) -> None:
    ledger = Ledger()
    ledger.pulled(Outcome(), Excuses(), "a good one")
    ledger.note(kind, "block 3 of owner 1")
    assert not ledger.is_good
    assert f"first {kind}: block 3 of owner 1" in ledger.lines()


def test_a_leak_is_found() -> None:
    ledger = Ledger()
    ledger.pulled(Outcome(), Excuses(), "a good one")
    ledger.at_rest("owner 1", {"leases": 0, "blocks": 0})
    assert ledger.is_good
    ledger.at_rest("owner 1", {"leases": 0, "blocks": 2})
    assert not ledger.is_good
    assert ledger.counts["leaked"] == 2


def test_a_soak_that_pulled_nothing_is_not_good() -> None:
    assert not Ledger().is_good
