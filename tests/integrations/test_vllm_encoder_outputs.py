# SPDX-License-Identifier: Apache-2.0
"""Encoder outputs between two servers' connectors: the right embeddings, pulled or encoded here; never others."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

from encoder_server import FORMAT, ROWS, WIDTH, EncoderServer, encoded, image, request  # isort: skip
from waiting import eventually

from kvlink.integrations.vllm.encoder.items import KEY
from kvlink.integrations.vllm.encoder.scheduler import OFFER
from kvlink.layout.model_identity import identity_text, model_id
from kvlink.ticket import Ticket


@pytest.fixture
def servers() -> Iterator[tuple[EncoderServer, EncoderServer]]:
    with (
        EncoderServer("encoder", produces=True) as encoder,
        EncoderServer("reader", consumes=True) as reader,
    ):
        yield encoder, reader


def offered(encoder: EncoderServer, *names: str) -> dict[str, Any]:
    """Returns the parameters that the router takes from the encoder server's answer, through JSON."""
    answer = encoder.answer(request("e-" + "".join(names), [image(name) for name in names]))
    assert set(answer) == set(names)
    return dict(json.loads(json.dumps(answer)))


def serves(reader: EncoderServer, params: object, *names: str, data: object = "pixels") -> None:
    """The reader's cache has the right embeddings afterwards."""
    reader.answer(request("r-" + "".join(names), [image(name, data=data) for name in names], params))
    for cache in reader.caches:
        for name in names:
            assert cache[name].equal(encoded(name))


def test_an_image_is_encoded_once(servers: tuple[EncoderServer, EncoderServer]) -> None:
    encoder, reader = servers
    serves(reader, offered(encoder, "a"), "a", data=None)
    assert (encoder.encoded, reader.encoded) == (["a"], [])
    assert encoder.counts == {"offered": 1}
    assert reader.counts == {"pulled": 1}


def test_it_is_kept_for_later_requests(servers: tuple[EncoderServer, EncoderServer]) -> None:
    encoder, reader = servers
    serves(reader, offered(encoder, "a"), "a")
    again = offered(encoder, "a")
    for params in (again, None):
        reader.forget()
        serves(reader, params, "a")
    assert (encoder.encoded, reader.encoded, reader.pulls) == (["a"], [], 1)
    assert encoder.counts == {"offered": 1}


def test_two_requests_share_a_pull(servers: tuple[EncoderServer, EncoderServer]) -> None:
    encoder, reader = servers
    params = offered(encoder, "a")
    first, second = (request(name, [image("a", data=None)], params) for name in ("x", "y"))
    for asked in (first, second):
        reader.step(asked)
    for asked in (first, second):
        reader.answer(asked)
    assert reader.caches[0]["a"].equal(encoded("a"))
    assert reader.pulls == 1


def test_all_ranks_load_and_one_saves() -> None:
    with (
        EncoderServer("encoder", produces=True, ranks=2) as encoder,
        EncoderServer("reader", consumes=True, ranks=3) as reader,
    ):
        serves(reader, offered(encoder, "a", "b"), "a", "b")
        assert reader.encoded == []
        encoder.stalls = {0}
        assert encoder.answer(request("x", [image("c")])) == {}


def test_evicted_at_the_encoder_server(servers: tuple[EncoderServer, EncoderServer]) -> None:
    encoder, reader = servers
    params = offered(encoder, "a")
    offered(encoder, "b", "c")
    serves(reader, params, "a")
    assert reader.encoded == ["a"]
    assert reader.counts == {"stale": 1, "encoded_here": 1}


def test_the_last_used_is_evicted_last(servers: tuple[EncoderServer, EncoderServer]) -> None:
    encoder, reader = servers
    first, second = offered(encoder, "a"), offered(encoder, "b")
    offered(encoder, "a")
    offered(encoder, "c")
    serves(reader, first, "a")
    serves(reader, second, "b")
    assert reader.encoded == ["b"]


def test_evicted_there_but_still_in_vllms_cache(servers: tuple[EncoderServer, EncoderServer]) -> None:
    encoder, reader = servers
    offered(encoder, "a")
    offered(encoder, "b", "c")
    serves(reader, offered(encoder, "a"), "a")
    assert (encoder.encoded, reader.encoded) == (["a", "b", "c"], [])


def test_the_encoder_server_is_gone() -> None:
    with (
        EncoderServer("encoder", produces=True) as encoder,
        EncoderServer("reader", consumes=True, timeout_s=0.5) as reader,
    ):
        params = offered(encoder, "a")
        encoder.close()
        serves(reader, params, "a")
        assert reader.encoded == ["a"]
        assert reader.counts == {"unreachable": 1, "encoded_here": 1}


def test_a_request_without_the_image_fails(servers: tuple[EncoderServer, EncoderServer]) -> None:
    """Once, and alone: the request beside it, which has the image, is served."""
    encoder, reader = servers
    params = offered(encoder, "a")
    offered(encoder, "b", "c")
    lost = request("x", [image("a", data=None)], params)
    taken: set[str] = set()

    def fails() -> bool:
        assert not reader.step(lost)
        taken.update(reader.scheduler.take_unavailable())
        return bool(taken)

    assert eventually(fails)
    assert taken == {"x"}
    assert reader.scheduler.take_unavailable() == set()
    serves(reader, params, "a")


CHANGES: list[dict[str, Any]] = [
    {"format": "another"},
    {"dtype": "float16"},
    {"rows": ROWS + 1},
    {"width": 2 * WIDTH},
    {"width": WIDTH + 1},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_another_shape_or_format_is_refused(
    servers: tuple[EncoderServer, EncoderServer], change: dict[str, Any]
) -> None:
    """Before a byte is read."""
    encoder, reader = servers
    params = offered(encoder, "a")
    params["a"][KEY].update(change)
    serves(reader, params, "a")
    assert (reader.encoded, reader.pulls) == (["a"], 0)
    assert reader.counts == {"mismatch": 1, "encoded_here": 1}


@pytest.mark.parametrize(
    "field", [{"name": "another"}, {"dtype": "float16", "item_bytes": 2}, {"hidden_size": 16}], ids=str
)
def test_servers_of_different_formats(field: dict[str, Any]) -> None:
    """Although the reader's bytes would fit, as for a model of the same sizes with another processor."""
    other = dataclasses.replace(FORMAT, **field)
    with (
        EncoderServer("encoder", produces=True) as encoder,
        EncoderServer("reader", consumes=True, format=other) as reader,
    ):
        serves(reader, offered(encoder, "a"), "a")
        assert (reader.encoded, reader.pulls) == (["a"], 0)
        assert reader.counts["mismatch"] == 1


MODELS = [identity_text(digit * 16, {"weights": digit, "name": "m"}) for digit in "ab"]


def test_servers_of_another_model_say_so(caplog: pytest.LogCaptureFixture) -> None:
    """Its name is not compared with that of the format, which is a digest."""
    formats = [dataclasses.replace(FORMAT, model=model, name=model[9:25]) for model in MODELS]
    with (
        EncoderServer("encoder", produces=True, format=formats[0]) as encoder,
        EncoderServer("reader", consumes=True, format=formats[1]) as reader,
    ):
        params = offered(encoder, "a")
        assert Ticket.from_text(params["a"][KEY]["ticket"]).model == model_id(MODELS[0])
        serves(reader, params, "a")
        assert (reader.encoded, reader.pulls) == (["a"], 0)
    assert "weights is b here, and a there" in caplog.text


def test_weights_that_change_end_the_sharing(servers: tuple[EncoderServer, EncoderServer]) -> None:
    encoder, reader = servers
    params = offered(encoder, "a")
    for server in servers:
        server.copies[0].is_outdated = True
    assert encoder.answer(request("e-b", [image("b")])) == {}
    for server in servers:
        server.step()  # from here on, the scheduler knows
    assert encoder.answer(request("e-a", [image("a")])) == {}
    serves(reader, params, "a")
    assert (reader.encoded, reader.pulls) == (["a"], 0)


def test_the_ticket_of_another_image(servers: tuple[EncoderServer, EncoderServer]) -> None:
    encoder, reader = servers
    params = offered(encoder, "a", "b")
    serves(reader, {"a": params["b"]}, "a")
    assert (reader.encoded, reader.pulls) == (["a"], 0)
    assert reader.counts["mismatch"] == 1


@pytest.mark.parametrize(
    "given", [None, [], "text", {}, {"ticket": "x"}, {"ticket": 5, "width": WIDTH}], ids=str
)
def test_what_is_no_offer_is_refused(servers: tuple[EncoderServer, EncoderServer], given: Any) -> None:
    _, reader = servers
    serves(reader, {"a": {KEY: given}}, "a")
    assert reader.counts == {"malformed": 1, "encoded_here": 1}


@pytest.mark.parametrize("params", [[], "text", {"a": None}, {"a": {"peer_host": "h"}}], ids=str)
def test_parameters_of_others_mean_nothing(servers: tuple[EncoderServer, EncoderServer], params: Any) -> None:
    _, reader = servers
    serves(reader, params, "a")
    assert reader.counts == {}


def test_an_output_of_another_shape_is_not_offered(servers: tuple[EncoderServer, EncoderServer]) -> None:
    encoder, _ = servers
    encoder.encode = lambda name: encoded(name, rows=ROWS + 1)  # type: ignore[method-assign]
    asked = request("x", [image("a")])
    assert encoder.answer(asked) == {}
    encoder.step()
    assert encoder.counts == {"unsaved": 1}


def test_a_server_that_is_both_offers_when_asked() -> None:
    with EncoderServer("both", produces=True, consumes=True) as server:
        assert server.answer(request("x", [image("a")])) == {}
        assert set(server.answer(request("y", [image("a")], {OFFER: True}))) == {"a"}
        server.forget()
        serves(server, None, "a")
        assert server.encoded == ["a"]


def test_a_ticket_of_a_tenant_cannot_be_changed(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("k" * 40)
    with (
        EncoderServer("encoder", produces=True, ticket_keys=str(file)) as encoder,
        EncoderServer("reader", consumes=True, ticket_keys=str(file)) as reader,
    ):
        params = offered(encoder, "a")
        changed = json.loads(json.dumps(params))
        ticket = Ticket.from_text(params["a"][KEY]["ticket"])
        moved = dataclasses.replace(ticket, block_ids=ticket.block_ids[::-1])
        changed["a"][KEY]["ticket"] = moved.to_text()
        serves(reader, changed, "a")
        assert reader.counts == {"malformed": 1, "encoded_here": 1}
        reader.forget()
        serves(reader, params, "a")
        assert reader.encoded == ["a"]
