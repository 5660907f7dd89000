# SPDX-License-Identifier: Apache-2.0
"""Strategies: what routers, clients and peers may send to two vLLM servers, and in which order things happen there."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from kvlink.integrations.vllm.chats.earlier_turns import ANSWER_AS, ANSWER_OF
from kvlink.integrations.vllm.wire.handoff import KEY, Handoff
from kvlink.integrations.vllm.wire.handoff_parts import STREAM
from kvlink.integrations.vllm.wire.traces import TRACEPARENT
from kvlink.ticket import LeaseSeat

Params = dict[str, Any]
Mutation = Callable[[Params], Any]

TICKET = "S1ZUM" + "A" * 95
IDS = st.sampled_from(
    ["r", "x" * 512, "x" * 513, "x" * 100_000, TICKET, f"a {TICKET} b", "\ud800", "a\0b\nc", "é" * 257, " ", "0_n",
     "kvlink-id-00", "9" * 600, "{}%s%n", "\u202e"]
)  # fmt: skip
TEXTS = IDS | st.text(max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NUMBERS = st.sampled_from([-1, 0, 1, 3, 4, 5, 7, 8, 16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**64, 10**400])
KEYS = [KEY, STREAM, ANSWER_AS, ANSWER_OF, TRACEPARENT, "do_remote_prefill", "do_remote_decode", "tp_size"]
FIELDS = ["ticket", "block_tokens", "owners", "groups", "prompt", "signature", "more"]


def honest(params: Params) -> Params:
    return params


def _with_key(name: str, value: Any) -> Mutation:
    return lambda params: params | {name: value}


def _with_field(name: str, value: Any) -> Mutation:
    return lambda params: params | {KEY: params[KEY] | {name: value}}


def _with_owner(at: int, value: Any) -> Mutation:
    def changed(params: Params) -> Params:
        first = list(params[KEY]["owners"][0])
        first[at] = value
        return params | {KEY: params[KEY] | {"owners": [first, *params[KEY]["owners"][1:]]}}

    return changed


def _rewritten(change: Callable[[Handoff], Handoff]) -> Mutation:
    """Another server could have sent it."""

    def changed(params: Params) -> Params:
        try:
            return params | {KEY: change(Handoff.from_params(params)).to_params()}
        except Exception:  # no server can send it
            return params

    return changed


def _sizes(sizes: list[int]) -> Mutation:
    return _with_field("block_tokens", ",".join(map(str, sizes)))


MUTATIONS: st.SearchStrategy[Mutation] = st.one_of(
    st.just(honest),
    st.just(honest),
    st.builds(_with_key, st.sampled_from(KEYS), JSON),
    st.builds(_with_field, st.sampled_from(FIELDS), JSON),
    st.builds(_with_owner, st.integers(0, 2), TEXTS | NUMBERS.map(lambda number: str(number)[:300]) | JSON),
    st.builds(_sizes, st.lists(NUMBERS.map(lambda number: number % 10**20), min_size=1, max_size=4)),
    JSON.map(lambda value: lambda params: value),
    st.integers(0, 4).map(
        lambda n: _rewritten(
            lambda h: replace(h, block_ids=h.block_ids[:1] * n, block_tokens=h.block_tokens[:1] * n)
        )
    ),
    st.tuples(NUMBERS, st.sampled_from([array("I"), array("I", [0]), array("I", [1, 2**32 - 1])])).map(
        lambda more: _rewritten(
            lambda h: replace(h, block_ids=(*h.block_ids, more[1]), block_tokens=(*h.block_tokens, more[0]))
        )
    ),
    st.integers(0, 6).map(lambda n: _rewritten(lambda h: replace(h, owners=h.owners[:1] * n))),
    NUMBERS.map(lambda number: _rewritten(lambda h: replace(h, num_tokens=number))),
    NUMBERS.map(lambda number: _rewritten(lambda h: replace(h, ttl_s=float(number)))),
    TEXTS.map(lambda text: _rewritten(lambda h: replace(h, request_id=text))),
    st.integers(1, 4).map(lambda n: _rewritten(lambda h: replace(h, seats=h.seats[:n]))),
    st.just(_rewritten(lambda h: replace(h, seats=(LeaseSeat(h.seats[0].slot, 1000, 1000),)))),
    st.just(_rewritten(lambda h: replace(h, seats=(LeaseSeat(h.seats[0].slot, h.seats[0].nonce, 1),)))),
)
"""Replacements of the parameters that prefill's answer had, on their way to decode."""


@dataclass(frozen=True)
class Story:
    """One request, as its client, the router and the peer make it."""

    id: str
    prefill: Params
    mutation: Mutation


STORIES = st.builds(
    Story,
    IDS,
    st.just({})
    | TEXTS.map(lambda text: {STREAM: text})
    | st.dictionaries(st.sampled_from(KEYS), JSON, max_size=1),
    MUTATIONS,
)

KINDS = ["prefill", "turn", "abort", "preempt", "reset", "late", "pause"]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["handoff"] * 3 + ["decode"] * 4 + ["step"] * 2 + KINDS),
        st.sampled_from("pd"),
        st.integers(0, 2),
    ),
    min_size=3,
    max_size=14,
)


def passed_on(params: Any) -> Any:
    """Returns parameters as a router passes them on, which parses and writes JSON."""
    try:
        return json.loads(json.dumps(params))
    except (TypeError, ValueError):
        return params


def mutated_part(part: bytes, mutation: Mutation) -> bytes:
    """Returns a part of a handoff as another server, or somebody at the coordinator, could have written it."""
    if mutation is honest:
        return part
    try:
        return json.dumps(mutation(json.loads(part))).encode()
    except (KeyError, TypeError, ValueError):
        return part[: len(part) // 2]
