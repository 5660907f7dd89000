# SPDX-License-Identifier: Apache-2.0
"""An exception that nobody expected on either side of encoder servers: one request pays, and images stay right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

from encoder_server import EncoderServer, encoded, image, request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm_hostile import JSON

from kvlink.integrations.vllm.encoder.items import KEY
from kvlink.transfer.pull import Pull


class Strange(Exception):
    """No code names this type."""


def raises(*_: object, **__: object) -> Any:
    raise Strange


@pytest.fixture
def servers() -> Iterator[tuple[EncoderServer, EncoderServer]]:
    with (
        EncoderServer("encoder", produces=True) as encoder,
        EncoderServer("reader", consumes=True) as reader,
    ):
        yield encoder, reader


def offered(encoder: EncoderServer, name: str) -> dict[str, Any]:
    return dict(json.loads(json.dumps(encoder.answer(request(f"e-{name}", [image(name)])))))


def is_served(reader: EncoderServer, params: object, name: str) -> None:
    reader.answer(request(f"r-{name}", [image(name)], params))
    assert reader.caches[0][name].equal(encoded(name))


@pytest.mark.parametrize("method", ["done", "wait"])
def test_a_pull_that_cannot_be_followed(
    servers: tuple[EncoderServer, EncoderServer], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, reader = servers
    params = offered(encoder, "a")
    with monkeypatch.context() as patched:
        patched.setattr(Pull, method, raises)
        is_served(reader, params, "a")
    assert reader.counts["unexpected"] >= 1
    is_served(reader, offered(encoder, "b"), "b")
    assert reader.encoded == ["a"]


@pytest.mark.parametrize("data", ["pixels", None])
def test_a_pull_that_cannot_be_started(servers: tuple[EncoderServer, EncoderServer], data: object) -> None:
    """The image is encoded here, or the request fails if it came without one."""
    encoder, reader = servers
    params, asked = offered(encoder, "a"), request("r", [image("a", data=data)])
    asked.ec_transfer_params = params
    reader._pull, pull = raises, reader._pull
    assert reader.step(asked) is (data is not None)
    assert reader.scheduler.take_unavailable() == (set() if data else {"r"})
    reader._pull = pull
    reader.scheduler.ended(asked)
    assert reader.counts["unexpected"] == 1
    is_served(reader, offered(encoder, "b"), "b")


@pytest.mark.parametrize("method", ["save", "ticket", "collect"])
def test_what_cannot_be_offered_is_not(servers: tuple[EncoderServer, EncoderServer], method: str) -> None:
    encoder, _ = servers
    offers = encoder.scheduler._offers
    setattr(offers, method, raises)
    answer = encoder.answer(request("e", [image("a")]))
    assert answer == {} or method == "collect"
    delattr(offers, method)
    assert offered(encoder, "b").keys() == {"b"}


def test_blocks_whose_offers_cannot_be_ended_keep_their_item(
    servers: tuple[EncoderServer, EncoderServer],
) -> None:
    encoder, reader = servers
    params = offered(encoder, "a")
    encoder.worker.revoke, revoke = raises, encoder.worker.revoke  # type: ignore[method-assign]
    for name in "bcd":
        encoder.answer(request(f"e-{name}", [image(name)]))
    encoder.worker.revoke = revoke  # type: ignore[method-assign]
    is_served(reader, params, "a")
    assert reader.encoded == []


@settings(
    derandomize=True, deadline=None, max_examples=150, suppress_health_check=list(HealthCheck), database=None
)
@given(st.sampled_from(["ticket", "rows", "width", "dtype", "format", "", "all"]), JSON)
def test_nothing_that_a_router_sends_ends_the_engine(
    servers: tuple[EncoderServer, EncoderServer], field: str, value: Any
) -> None:
    encoder, reader = servers
    reader.forget()
    params: Any = offered(encoder, "a")
    if field == "all":
        params = value
    elif field:
        params["a"][KEY][field] = value
    else:
        params["a"][KEY] = value
    is_served(reader, params, "a")
    assert "unexpected" not in reader.counts
