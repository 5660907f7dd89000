# SPDX-License-Identifier: Apache-2.0
"""Real servers live through hostile requests and peers that do not fit, and everybody else gets the right tokens.

Each test prints what its client got. A server whose engine has ended fails the test that ended it, and is started
again for the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import hostile_clients
import pytest
from connectors import kv_transfer
from hostile_requests import (
    KEY,
    NUM_NEW,
    NUM_TOKENS,
    OTHER_MODELS,
    PEERS,
    REQUESTS,
    TTL_MS,
    Allowed,
    At,
    Given,
    Hostile,
    Manner,
    Mismatched,
    forged,
    ticket_with,
)
from pair import Answer, Pair, Tokens, ask, eventually, flags, prompt
from references import References
from servers import Server, router, running, vllm

from kvlink.ticket import Ticket

LENGTH, CONTROL_LENGTH = 300, 200
LEASE_S = 12
_SETTLE_S = 60.0
_DEAD_S = 10.0
_NOTICED_S = 60.0
"""The time in which the router finds a server that was started again."""

_ONE_RANK = {"model": "llama", "policy": "recompute", "lease_s": LEASE_S}
_FAILING = {**_ONE_RANK, "policy": "fail"}
_SEVERAL_RANKS = {**_ONE_RANK, "lease_s": 30, "tp": (2, 1)}

pytestmark = [pytest.mark.timeout(900), pytest.mark.pairs(_ONE_RANK, _FAILING, _SEVERAL_RANKS)]


def prompts_of(name: str) -> tuple[Tokens, Tokens, Tokens]:
    """Returns the prompts of a hostile request, of the client beside it, and of the one after it."""
    return (
        prompt(name, LENGTH),
        prompt(f"beside {name}", CONTROL_LENGTH),
        prompt(f"after {name}", CONTROL_LENGTH),
    )


@pytest.fixture(scope="session")
def all_prompts(references: References) -> None:
    """Their tokens are known before anything hostile begins, and no plain server runs beside the pair."""
    names = [one.name for one in (*REQUESTS, *PEERS)] + [f"prefill of {model}" for model in OTHER_MODELS]
    references.learn(tokens for name in names for tokens in prompts_of(name))


@pytest.fixture(scope="session")
def front(pair: Pair) -> Iterator[Server]:
    """kvlink's router in front of the pair."""
    with running([router([pair.prefill], [pair.decode])]) as (server,):
        yield server


@pytest.fixture
def alive(pair: Pair, front: Server, all_prompts: None) -> Iterator[None]:
    """Starts what an earlier test ended, and fails the test that ends something."""
    for role in ("prefill", "decode"):
        if not getattr(pair, role).healthy():
            setattr(pair, role, getattr(pair, role).restarted().wait())
    known = prompt("warm up", 300)
    assert eventually(lambda: ask(front.url, pair.model, known, 1).status == 200, _NOTICED_S)
    yield
    ended = [role for role in ("prefill", "decode") if has_ended(getattr(pair, role))]
    assert not ended, "\n".join(f"{role} HAS ENDED: {why_ended(getattr(pair, role))}" for role in ended)


def has_ended(server: Server) -> bool:
    """Returns whether its engine has ended. vLLM's API server may not know that at once."""
    return not server.healthy() and not eventually(server.healthy, _DEAD_S)


def why_ended(server: Server) -> str:
    lines = server.tail(400).splitlines()
    return next((line for line in reversed(lines) if "Error:" in line and "kvlink" not in line), lines[-1])


@pytest.mark.parametrize("hostile", REQUESTS, ids=lambda one: one.name)
def test_hostile_requests(
    pair: Pair, references: References, front: Server, alive: None, hostile: Hostile
) -> None:
    mine, beside, _ = prompts_of(hostile.name)
    handoff = handoff_for(pair, hostile, mine)
    url = {At.PREFILL: pair.prefill, At.DECODE: pair.decode, At.ROUTER: front}[hostile.at].url
    wire = hostile.wire(url.removeprefix("http://"), pair.model, mine, handoff)
    answers = with_a_client_beside(
        pair,
        front,
        references,
        beside,
        [lambda: hostile_clients.send(url, wire, hostile.manner)] * hostile.copies,
    )
    print(f"\n{hostile.name}: {[answer and answer.status for answer in answers]}")
    expected = references(mine)[: 1 if hostile.at is At.PREFILL else NUM_NEW]
    assert all(is_allowed(answer, hostile, expected) for answer in answers), answers
    check_after(pair, front, references, hostile.name)


@pytest.mark.parametrize("peer", PEERS, ids=lambda one: one.name)
def test_peers_that_do_not_fit(
    pair: Pair, references: References, front: Server, alive: None, peer: Mismatched
) -> None:
    mine, beside, _ = prompts_of(peer.name)
    handoff = pair.hand_off(mine)
    with hostile_clients.agent(peer.agent) as address:
        params = peer.handoff(handoff, address if peer.agent else "")
        (answer,) = with_a_client_beside(
            pair, front, references, beside, [lambda: pair.continued(mine, params)]
        )
    print(f"\n{peer.name}: {answer and answer.status}")
    check_refused_or_right(pair, answer, references(mine))
    check_after(pair, front, references, peer.name)


def test_what_is_forged_passes_for_a_ticket(pair: Pair, alive: None) -> None:
    """Or the requests with such tickets would all try the same: a ticket that does not parse."""
    text = pair.hand_off(prompt("forged", LENGTH))[KEY]["ticket"]
    ticket = Ticket.from_text(text)
    assert {seat.slot for seat in Ticket.from_text(forged(text)).seats} == {
        seat.slot for seat in ticket.seats
    }
    assert not {seat.nonce for seat in Ticket.from_text(forged(text)).seats} & {
        seat.nonce for seat in ticket.seats
    }
    assert replace(ticket, ttl_s=0.0) == Ticket.from_text(ticket_with(text, TTL_MS, 0))
    assert replace(ticket, num_tokens=7) == Ticket.from_text(ticket_with(text, NUM_TOKENS, 7))


def test_every_block_comes_back(pair: Pair, alive: None) -> None:
    assert pair.settles(pair.lease_s + _SETTLE_S)
    assert eventually(lambda: pair.prefill.metric("vllm:kvlink_active_leases") == 0, 5)


@pytest.mark.pairs(_ONE_RANK)
@pytest.mark.parametrize("model", OTHER_MODELS)
def test_honest_servers_of_another_model(
    pair: Pair, references: References, front: Server, alive: None, model: str
) -> None:
    """Its layers, heads, cache groups or windows differ. Decode refuses its handoffs, and goes on."""
    name = f"prefill of {model}"
    mine, _, after = prompts_of(name)
    config = kv_transfer("KVLinkConnector", lease_s=LEASE_S)
    pair.prefill.close()  # makes room
    try:
        with running([vllm(f"other-{model}", model, config, flags(model))]) as (other,):
            asked = {"do_remote_decode": True, "do_remote_prefill": False}
            handoff = ask(other.url, model, mine, 1, kv_transfer_params=asked).handoff
            assert handoff
            answer = pair.continued(mine, handoff)
    finally:
        pair.prefill = pair.prefill.restarted().wait()
    print(f"\n{name}: {answer.status}")
    check_refused_or_right(pair, answer, references(mine))
    assert ask(front.url, pair.model, after).tokens == references(after)


def handoff_for(pair: Pair, hostile: Hostile, tokens: Sequence[int]) -> object:
    """Returns an honest handoff in the state that the request needs, or None."""
    if hostile.given is Given.NOTHING:
        return None
    other = hostile.given is Given.OF_ANOTHER_PROMPT
    handoff = pair.hand_off(prompt("another", LENGTH) if other else tokens)
    if hostile.given is Given.USED:
        assert pair.continued(tokens, handoff, 1).status == 200
    if hostile.given is Given.EXPIRED:
        time.sleep(pair.lease_s + 2)
    return handoff


def with_a_client_beside(
    pair: Pair,
    front: Server,
    references: References,
    tokens: Tokens,
    hostile: Sequence[Callable[[], Answer | None]],
) -> list[Answer | None]:
    """Lets the hostile clients and an honest one ask at once. Returns the answers of the hostile ones."""
    with ThreadPoolExecutor(len(hostile) + 1) as pool:
        honest = pool.submit(lambda: ask(front.url, pair.model, tokens))
        answers = list(pool.map(lambda send: send(), hostile))
        answer = honest.result()
    assert (answer.status, answer.tokens) == (200, references(tokens)), f"the client beside got {answer}"
    return answers


def check_after(pair: Pair, front: Server, references: References, name: str) -> None:
    """Both servers and the pair of them answer right afterwards."""
    tokens = prompts_of(name)[2]
    for server in (front, pair.prefill, pair.decode):
        answer = ask(server.url, pair.model, tokens)
        assert (answer.status, answer.tokens) == (200, references(tokens)), f"{server!r} answers {answer}"


def is_allowed(answer: Answer | None, hostile: Hostile, expected: Tokens) -> bool:
    if hostile.allowed is Allowed.ANYTHING:
        return True
    if answer is None:
        return hostile.manner is not Manner.WHOLE
    if answer.status == 200:
        return answer.tokens == expected
    return hostile.allowed is Allowed.RIGHT_OR_REFUSED and answer.status >= 400


def check_refused_or_right(pair: Pair, answer: Answer | None, expected: Tokens) -> None:
    """With the policy `fail`, the client gets an error. With `recompute` it gets the tokens."""
    assert answer is not None
    if answer.status == 200:
        assert answer.tokens == expected
    else:
        assert answer.status == 500
        assert any('"fail"' in part for part in pair.decode.launch.command), answer
