# SPDX-License-Identifier: Apache-2.0
"""Every message survives the way there and back; nothing foreign gets past the decoder but values within bounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from control.cards import make_card, make_offer
from control.codec_values import EXAMPLES, METHODS, cards
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlink.control.codec import CARD, AgentCalls, Codec, CoordinatorCalls, Method
from kvlink.control.limits import (
    MAX_BATCH_OPS,
    MAX_HELLOS,
    MAX_NAME_BYTES,
    MAX_OPAQUE_BYTES,
)
from kvlink.control.overview import (
    MAX_LINKS,
    Beat,
    FailureCount,
    LinkReport,
    WorkerReport,
)
from kvlink.control.values import (
    Claim,
    ConnectRequest,
    HandoffBatch,
    WorkerEpoch,
)
from kvlink.errors import ConfigError
from kvlink.layout import Plane


@pytest.mark.parametrize(("codec", "values"), EXAMPLES)
@settings(max_examples=25)
@given(data=st.data())
def test_every_value_comes_back_equal(
    codec: Codec[Any], values: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    value = data.draw(values)
    assert codec.decode(codec.encode(value)) == value


def decoded(codec: Codec[Any], blob: bytes) -> Any:
    """None if refused; anything but ConfigError escapes."""
    try:
        return codec.decode(blob)
    except ConfigError:
        return None


def _mutate(data: st.DataObject, blob: bytes) -> bytes:
    if data.draw(st.booleans(), "truncate"):
        return blob[: data.draw(st.integers(0, max(0, len(blob) - 1)))]
    damaged = bytearray(blob)
    for _ in range(data.draw(st.integers(1, 4))):
        if damaged:
            at = data.draw(st.integers(0, len(damaged) - 1))
            damaged[at] ^= data.draw(st.integers(1, 255))
    return bytes(damaged)


@given(st.data())
def test_a_damaged_message_is_refused_or_still_within_bounds(data: st.DataObject) -> None:
    codec, values = data.draw(st.sampled_from(EXAMPLES))
    damaged = _mutate(data, codec.encode(data.draw(values)))
    value = decoded(codec, damaged)
    assert value is None or codec.decode(codec.encode(value)) == value


@given(st.data())
def test_a_damaged_card_is_refused(data: st.DataObject) -> None:
    card = data.draw(cards())
    damaged = _mutate(data, CARD.encode(card))
    assert decoded(CARD, damaged) in (None, card)  # equal: for instance a longer form of the same number


@given(blob=st.binary(max_size=300), method=st.sampled_from(METHODS))
def test_noise_raises_nothing_but_config_error(blob: bytes, method: Method[Any, Any]) -> None:
    decoded(method.request, blob)
    decoded(method.reply, blob)


OFFER, CLAIM = make_offer("r"), Claim("r", 1.0)
REPORT, LINK = WorkerReport(), LinkReport("w", "tcp")


@pytest.mark.parametrize(
    ("codec", "value", "names"),
    [
        (CoordinatorCalls.OFFER.request, OFFER._replace(request_id=""), "request_id"),
        (CoordinatorCalls.OFFER.request, OFFER._replace(request_id="é" * 257), "request_id has 514 bytes"),
        (CoordinatorCalls.OFFER.request, OFFER._replace(ttl_s=float("nan")), "ttl_s"),
        (CoordinatorCalls.OFFER.request, OFFER._replace(ttl_s=0.0), "ttl_s"),
        (CoordinatorCalls.OFFER.request, OFFER._replace(rank=1), "rank 1 of 1"),
        (CoordinatorCalls.OFFER.request, OFFER._replace(num_seats=0), "num_seats"),
        (CoordinatorCalls.OFFER.request, OFFER._replace(ticket=b""), "ticket"),
        (CoordinatorCalls.OFFER.request, OFFER._replace(epoch=-1), "Offer"),
        (CoordinatorCalls.CLAIM.request, CLAIM._replace(timeout_s=float("inf")), "timeout_s"),
        (CoordinatorCalls.CLAIM.request, CLAIM._replace(reader=1), "reader 1 of 1"),
        (CoordinatorCalls.LEAVE.request, WorkerEpoch("w" * (MAX_NAME_BYTES + 1), 1), "worker_id"),
        (
            CoordinatorCalls.KEEP_ALIVE.request,
            Beat("w", 1, REPORT._replace(links=(LINK,) * (MAX_LINKS + 1))),
            "number of links is 33",
        ),
        (CoordinatorCalls.KEEP_ALIVE.request, Beat("w", 1, REPORT._replace(oldest_lease_s=-1.0)), "oldest"),
        (
            CoordinatorCalls.KEEP_ALIVE.request,
            Beat("w", 1, REPORT._replace(failures=(FailureCount("é" * 33, 1),))),
            "bytes of a reason",
        ),
        (AgentCalls.CONNECT.request, ConnectRequest("w", 1, "tcp", []), "hellos"),
        (AgentCalls.CONNECT.request, ConnectRequest("w", 1, "tcp", [b""] * (MAX_HELLOS + 1)), "hellos"),
        (AgentCalls.CONNECT.request, ConnectRequest("w", 1, "tcp", [bytes(MAX_OPAQUE_BYTES + 1)]), "a hello"),
    ],
)
def test_what_exceeds_a_bound_is_not_sent(codec: Codec[Any], value: Any, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        codec.encode(value)


def test_a_batch_of_too_many_operations_is_not_taken() -> None:
    batch = HandoffBatch([], [], [CLAIM] * (MAX_BATCH_OPS + 1))
    blob = CoordinatorCalls.HANDOFFS.request.encode(batch)
    with pytest.raises(ConfigError, match=r"operations in a batch is (over 1024|1025)"):
        CoordinatorCalls.HANDOFFS.request.decode(blob)


def test_a_card_of_another_protocol_version_says_what_to_do() -> None:
    blob = CARD.encode(dataclasses.replace(make_card(), protocol_version=9))
    with pytest.raises(
        ConfigError,
        match=r"worker 'prefill' speaks protocol version 9 and this process speaks 5; run releases",
    ):
        CARD.decode(blob)


def test_a_card_with_an_impossible_layout_is_refused() -> None:
    card = make_card()
    layout = dataclasses.replace(card.layouts[0])
    object.__setattr__(layout, "planes", (Plane(0, 0, 2**63),))
    with pytest.raises(ConfigError, match=r"malformed SealedCard: layout: planes\[0\]"):
        CARD.decode(CARD.encode(dataclasses.replace(card, layouts=(layout,))))
