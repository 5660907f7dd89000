# SPDX-License-Identifier: Apache-2.0
"""Ids that clients choose: two requests of one id, and ids that are long, odd or secret."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import recent_transformers  # noqa: F401
from stepped_batching import MAX_NEW, Stepped, expected, reference

from kvlink import Ticket
from kvlink.errors import ConfigError
from kvlink.integrations.transformers import Handoff

pytestmark = pytest.mark.timeout(120)

OWN, OTHER = tuple(range(13)), tuple(range(40, 60))
ODD = [
    "",
    "i" * 600,
    "\ud800",
    "a\nb\0",
    "é" * 300,
    "kvlink-0",
    "kvlink-probe",
    "kvlink-fetch-0",
    "kvlink-share-0",
]


@pytest.fixture
def peers() -> Iterator[tuple[Stepped, Stepped]]:
    peers = Stepped("prefill"), Stepped("decode", page_size=8, num_blocks=12)
    yield peers
    for peer in peers:
        assert peer.manager.is_running()
        peer.until(lambda peer=peer: peer.handoff._batching.request_ids._taken == set())
        peer.close()
        assert peer.used() == 0
        assert peer.handoff.stats().guarded == 0


@pytest.fixture(scope="module", autouse=True)
def with_reference() -> Iterator[None]:
    with reference():
        yield


def handed(peer: Stepped, prompt: tuple[int, ...], request_id: str | None = None) -> Handoff:
    future = peer.handoff.prefill(prompt, request_id)
    peer.until(future.done)
    return future.result()


def answers(peer: Stepped, count: int) -> list[Any]:
    peer.until(lambda: len(peer.outputs) >= count)
    return peer.outputs


@pytest.mark.parametrize("state", ["queued", "waiting", "active"])
@pytest.mark.parametrize("call", ["prefill", "submit"])
def test_an_id_of_the_managers_own_request_is_refused(
    peers: tuple[Stepped, Stepped], state: str, call: str
) -> None:
    prefill, decode = peers
    handoff = handed(prefill, OTHER)
    if state == "waiting":
        decode.manager.add_request([1] * 90, "first", max_new_tokens=2)
        decode.step()
    decode.manager.add_request(list(OWN), "one", max_new_tokens=MAX_NEW)
    if state != "queued":
        decode.step()
    scheduler = decode.handoff._batching.scheduler
    assert ("one" in scheduler.active_requests, "one" in scheduler.waiting_requests) == (
        state == "active",
        state == "waiting",
    )
    given: Any = OTHER if call == "prefill" else handoff
    with pytest.raises(ConfigError, match="request one already runs here"):
        getattr(decode.handoff, call)(given, "one")
    decode.until(lambda: "one" in [output.request_id for output in decode.outputs])
    (own,) = [output for output in decode.outputs if output.request_id == "one"]
    assert list(own.generated_tokens) == expected(OWN)
    decode.handoff.submit(handoff, "one", max_new_tokens=2)
    decode.until(lambda: decode.outputs[-1] is not own)
    assert list(decode.outputs[-1].generated_tokens) == expected(OTHER, 2)


@pytest.mark.parametrize("first", ["prefill", "submit", "own"])
def test_a_request_of_the_managers_own_that_has_a_taken_id_fails_alone(
    peers: tuple[Stepped, Stepped], first: str
) -> None:
    prefill, decode = peers
    handoff = handed(prefill, OTHER)
    future = None
    if first == "own":
        decode.manager.add_request(list(OTHER), "one", max_new_tokens=3)
    elif first == "submit":
        decode.handoff.submit(handoff, "one", max_new_tokens=3)
    else:
        future = decode.handoff.prefill(OTHER, "one")
    decode.manager.add_request(list(OTHER), "one", max_new_tokens=5)
    outputs = answers(decode, 1 if future else 2)
    if future is not None:
        decode.until(future.done)
        decode.handoff.abort(future.result(0))
    errors = [output.error for output in outputs if output.error]
    assert errors == ["request one already runs here; give each request its own request_id"]
    tokens = [list(output.generated_tokens) for output in outputs if not output.error]
    assert tokens == ([] if future else [expected(OTHER, 3)])


def test_ids_that_nobody_chose_are_free(peers: tuple[Stepped, Stepped]) -> None:
    prefill, decode = peers
    for name in ("prefill-0", "handoff-0"):
        prefill.manager.add_request(list(OWN), name, max_new_tokens=1)
        decode.manager.add_request(list(OWN), name, max_new_tokens=1)
    handoff = handed(prefill, OTHER)
    assert decode.handoff.submit(handoff, max_new_tokens=2) == "handoff-1"
    assert list(answers(decode, 3)[-1].generated_tokens) == expected(OTHER, 2)


@pytest.mark.parametrize("name", ODD)
def test_any_text_is_an_id(peers: tuple[Stepped, Stepped], name: str) -> None:
    """At prefill, at decode, and of a request that moves while others with kvlink's own names have blocks."""
    prefill, decode = peers
    decode.manager.add_request(list(OWN), "kvlink-1", max_new_tokens=MAX_NEW)
    handoff = Handoff.from_json(handed(prefill, OTHER, name).to_json())
    assert decode.handoff.submit(handoff, name, max_new_tokens=4) == name
    outputs = {output.request_id: list(output.generated_tokens) for output in answers(decode, 2)}
    assert outputs == {name: expected(OTHER, 4), "kvlink-1": expected(OWN)}
    assert decode.handoff.stats().pulled == 1
    decode.manager.add_request(list(OWN), name, max_new_tokens=MAX_NEW)
    decode.step()
    moved = decode.handoff.move(name)
    decode.until(moved.done)
    prefill.handoff.submit(moved.result(), name, max_new_tokens=MAX_NEW)
    assert list(answers(prefill, 1)[0].generated_tokens) == expected(OWN)
    assert prefill.handoff.stats().pulled == 1


def test_the_names_of_kvlinks_own_tables_cannot_be_taken(peers: tuple[Stepped, Stepped]) -> None:
    prefill, _ = peers
    names = [f"kvlink-{number}" for number in range(4)]
    handoffs = [handed(prefill, OTHER), handed(prefill, OTHER)]
    for name in names:
        prefill.manager.add_request(list(OWN), name, max_new_tokens=MAX_NEW)
    prefill.step()
    for handoff in handoffs:
        prefill.handoff.abort(handoff)
    prefill.until(lambda: not prefill.handoff._outgoing._offered)
    outputs = {output.request_id: list(output.generated_tokens) for output in answers(prefill, 4)}
    assert outputs == dict.fromkeys(names, expected(OWN))


def test_an_id_that_contains_a_ticket_is_in_no_name_and_no_error(peers: tuple[Stepped, Stepped]) -> None:
    prefill, decode = peers
    secret = handed(prefill, OWN).ticket
    handoff = handed(prefill, OTHER, f"id {secret}")
    assert secret not in Ticket.from_text(handoff.ticket).request_id
    for _ in range(2):
        try:
            decode.handoff.submit(handoff, f"id {secret}", max_new_tokens=2)
        except ConfigError as error:
            assert secret[:20] not in str(error)
    assert list(answers(decode, 1)[0].generated_tokens) == expected(OTHER, 2)
    prefill.handoff.abort(Handoff(secret, OWN, 0))


@pytest.mark.parametrize("name", [5, b"bytes", ["list"], ("tuple",)])
def test_what_is_no_text_is_no_id(peers: tuple[Stepped, Stepped], name: Any) -> None:
    prefill, decode = peers
    handoff = handed(prefill, OTHER)
    for call in (
        lambda: decode.handoff.prefill(OWN, name),
        lambda: decode.handoff.submit(handoff, name),
        lambda: decode.handoff.move(name),
    ):
        with pytest.raises(ConfigError, match="a request_id must be text"):
            call()
    prefill.handoff.abort(handoff)
