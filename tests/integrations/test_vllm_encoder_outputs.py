# SPDX-License-Identifier: Apache-2.0
"""Outputs of vLLM's encoder: what is offered and pulled, the pool that holds them, and the guards around both."""

from __future__ import annotations

import dataclasses
import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

from encoder_server import FORMAT, ROWS, WIDTH, EncoderServer, encoded, image, request  # isort: skip
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm_hostile import JSON
from waiting import eventually

from kvlink.errors import ConfigError, LayoutMismatch
from kvlink.integrations.vllm.encoder import items
from kvlink.integrations.vllm.encoder.items import KEY, ItemFormat
from kvlink.integrations.vllm.encoder.memory import EncoderMemory, MemoryShape
from kvlink.integrations.vllm.encoder.scheduler import OFFER
from kvlink.integrations.vllm.encoder.settings import EncoderSettings
from kvlink.layout.model_identity import identity_text, model_id
from kvlink.ticket import Ticket
from kvlink.transfer.pull import Pull


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


@pytest.fixture
def encoder() -> Iterator[EncoderServer]:
    with EncoderServer("encoder", produces=True, num_images=8) as encoder:
        yield encoder


def test_a_rank_that_has_not_loaded_yet_keeps_the_blocks(encoder: EncoderServer) -> None:
    """A step may be carried out long after the next ones are scheduled."""
    with EncoderServer("reader", consumes=True, num_images=1, ranks=2) as reader:
        params = [encoder.answer(request(name, [image(name)])) for name in "ab"]
        reader.stalls = {1}
        reader.answer(request("x", [image("a")], params[0]))
        waiting = request("y", [image("b", data=None)], params[1])
        for _ in range(5):
            assert not reader.step(waiting)
        reader.stalls.clear()
        for rank, step in reader.stalled:
            reader.carry_out(rank, step)
        assert reader.caches[1]["a"].equal(encoded("a"))
        reader.answer(waiting)
        assert reader.caches[1]["b"].equal(encoded("b"))


def test_an_item_that_the_step_is_to_load_is_not_evicted_for_one_that_it_saves() -> None:
    with EncoderServer("both", produces=True, consumes=True, num_images=1) as server:
        server.answer(request("x", [image("a")]))
        server.forget()
        server.answer(request("y", [image("b"), image("a", offset=ROWS)]))
        assert server.encoded == ["a", "b"]
        assert server.caches[0]["a"].equal(encoded("a"))
        assert server.counts["no_room"] == 1


def test_images_of_one_request_do_not_evict_each_other(encoder: EncoderServer) -> None:
    """All of a request's images wait for the last one."""
    with EncoderServer("reader", consumes=True, num_images=2) as reader:
        params = encoder.answer(request("e", [image(name) for name in "abc"]))
        asked = request("x", [image("a", data=None), image("b", offset=ROWS, data=None)], params)
        assert eventually(lambda: reader.scheduler.available(asked, 0))
        other = request("y", [image("c", data=None)], params)
        assert not reader.scheduler.available(other, 0)
        assert reader.pulls == 2
        reader.answer(asked)
        reader.answer(other)
        assert reader.encoded == []
        assert reader.counts == {"pulled": 3}


def test_room_that_does_not_come_is_waited_for_as_long_as_a_pull(encoder: EncoderServer) -> None:
    with EncoderServer("reader", consumes=True, num_images=1) as reader:
        clock = [0.0]
        reader.scheduler._pulls._now = lambda: clock[0]
        params = encoder.answer(request("e", [image(name) for name in "ab"]))
        asked = request("x", [image("a"), image("b", offset=ROWS)], params)
        for _ in range(3):
            assert not reader.step(asked)
        clock[0] = reader.timeout_s
        reader.answer(asked)
        assert reader.caches[0]["a"].equal(encoded("a"))
        assert reader.encoded == ["b"]
        assert reader.counts == {"pulled": 1, "no_room": 1, "encoded_here": 1}


def test_a_request_that_ends_gives_its_images_up(encoder: EncoderServer) -> None:
    with EncoderServer("reader", consumes=True, num_images=1) as reader:
        params = encoder.answer(request("e", [image(name) for name in "ab"]))
        left = request("x", [image("a")], params)
        reader.scheduler.available(left, 0)
        reader.end(left)
        reader.answer(request("y", [image("b", data=None)], params))
        assert reader.caches[0]["b"].equal(encoded("b"))


class HeldPull:
    """A pull that ends when it is told to."""

    def __init__(self) -> None:
        self.ended = False

    def done(self) -> bool:
        return self.ended

    def wait(self, timeout_s: float) -> bool:
        return True


def test_a_pull_keeps_its_blocks_although_its_request_has_ended(encoder: EncoderServer) -> None:
    with EncoderServer("reader", consumes=True, num_images=1) as reader:
        params = encoder.answer(request("e", [image(name) for name in "ab"]))
        held, pull = HeldPull(), reader.worker.pull
        reader.worker.pull = lambda *_, **__: held  # type: ignore[method-assign, assignment]
        left, other = request("x", [image("a")], params), request("y", [image("b", data=None)], params)
        assert not reader.step(left)
        reader.end(left)
        reader.worker.pull = pull  # type: ignore[method-assign]
        assert not reader.step(other)
        assert reader.pulls == 0
        held.ended = True
        reader.answer(other)
        assert reader.caches[0]["b"].equal(encoded("b"))


def test_a_loaded_image_makes_room_while_its_request_runs(encoder: EncoderServer) -> None:
    with EncoderServer("reader", consumes=True, num_images=1) as reader:
        params = encoder.answer(request("e", [image(name) for name in "ab"]))
        running = request("x", [image("a", data=None)], params)
        assert eventually(lambda: reader.step(running))
        reader.answer(request("y", [image("b", data=None)], params))
        assert reader.caches[0]["b"].equal(encoded("b"))


def test_an_item_that_is_larger_than_the_pool(encoder: EncoderServer) -> None:
    with EncoderServer("reader", consumes=True, num_images=1) as reader:
        reader.scheduler._pulls._now = lambda: 0.0
        large = image("a", rows=4 * ROWS)
        encoder.encode = lambda name: encoded(name, rows=4 * ROWS)  # type: ignore[method-assign]
        params = encoder.answer(request("e", [large]))
        assert set(params) == {"a"}
        reader.encode = encoder.encode  # type: ignore[method-assign]
        reader.answer(request("x", [large], params))
        assert reader.encoded == ["a"]
        assert reader.counts == {"no_room": 1, "encoded_here": 1}


def test_an_item_with_another_number_of_embeddings_is_not_loaded(encoder: EncoderServer) -> None:
    """Clients may give two images one name."""
    with EncoderServer("reader", consumes=True) as reader:
        params = encoder.answer(request("e", [image("a")]))
        reader.answer(request("x", [image("a")], params))
        reader.forget()
        reader.encode = lambda name: encoded(name, rows=2)  # type: ignore[method-assign]
        for asked in (params, None):
            reader.answer(request("y", [image("a", rows=2)], asked))
            assert reader.caches[0]["a"].equal(encoded("a", rows=2))
            reader.forget()
        assert not reader.step(request("z", [image("a", rows=2, data=None)], params))
        assert reader.scheduler.take_unavailable() == {"z"}


def test_an_aborted_save_comes_back(encoder: EncoderServer) -> None:
    """The request ends before the step that encodes its image is carried out."""
    encoder.stalls = {0}
    asked = request("x", [image(str(number)) for number in range(8)])
    assert encoder.step(asked)
    assert encoder.end(asked) == {}
    encoder.stalls.clear()
    later = request("y", [image("late")])
    assert encoder.answer(later) == {}
    for rank, step in encoder.stalled:
        encoder.carry_out(rank, step)
    encoder.step()
    encoder.forget()
    assert set(encoder.answer(later)) == {"late"}


def test_a_pull_takes_the_blocks_of_an_item_that_its_step_did_not_write(encoder: EncoderServer) -> None:
    with EncoderServer("both", produces=True, consumes=True, num_images=1) as server:
        server.encode = lambda name: encoded(name, rows=ROWS + 1)  # type: ignore[method-assign]
        assert server.step(request("x", [image("a")]))
        params = encoder.answer(request("e", [image("b")]))
        server.answer(request("y", [image("b", data=None)], params))
        assert server.caches[0]["b"].equal(encoded("b"))


@pytest.mark.parametrize("num_bytes", [1, 63, 64, 65, 192])
def test_two_mappings_share_the_bytes(num_bytes: int) -> None:
    shape = MemoryShape(num_blocks=5, block_bytes=64, num_ranks=2)
    memory, fd = EncoderMemory.create(shape)
    other = EncoderMemory.open(f"/proc/{os.getpid()}/fd/{fd}", shape)
    os.close(fd)
    content = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8)
    blocks = array("I", [4, 1, 3][: -(-num_bytes // 64)])
    other.write(blocks, content, 7)
    assert memory.read(blocks, num_bytes).tobytes() == content.tobytes()
    assert memory.stamps.tolist() == [0, 0, 0, 0, 7]
    other.steps[1] = 9
    assert memory.steps.tolist() == [0, 9]
    assert not memory.blocks[[0, 2]].any()


def test_memory_of_another_host_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="must run on one host"):
        EncoderMemory.open("/proc/self/fd/100000", MemoryShape(1, 64, 1))


def test_settings(caplog: pytest.LogCaptureFixture) -> None:
    settings = EncoderSettings.of({"pool_mib": 2, "transports": "tcp", "pool_mb": 1})
    assert settings.shape(2) == MemoryShape(32, 1 << 16, 2)
    assert (settings.worker.transports, settings.worker.lease_slots) == ("tcp", 32)
    assert "does not know pool_mb" in caplog.text


@pytest.mark.parametrize("pool_mib", [0, -1, True, "8", 1.5, 1 << 30])
def test_settings_out_of_bounds(pool_mib: object) -> None:
    with pytest.raises(ConfigError, match="pool_mib"):
        EncoderSettings.of({"pool_mib": pool_mib})


class Strange(Exception):
    """No code names this type."""


def raises(*_: object, **__: object) -> Any:
    raise Strange


def offered_once(encoder: EncoderServer, name: str) -> dict[str, Any]:
    return dict(json.loads(json.dumps(encoder.answer(request(f"e-{name}", [image(name)])))))


def is_served(reader: EncoderServer, params: object, name: str) -> None:
    reader.answer(request(f"r-{name}", [image(name)], params))
    assert reader.caches[0][name].equal(encoded(name))


@pytest.mark.parametrize("method", ["done", "wait"])
def test_a_pull_that_cannot_be_followed(
    servers: tuple[EncoderServer, EncoderServer], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, reader = servers
    params = offered_once(encoder, "a")
    with monkeypatch.context() as patched:
        patched.setattr(Pull, method, raises)
        is_served(reader, params, "a")
    assert reader.counts["unexpected"] >= 1
    is_served(reader, offered_once(encoder, "b"), "b")
    assert reader.encoded == ["a"]


@pytest.mark.parametrize("data", ["pixels", None])
def test_a_pull_that_cannot_be_started(servers: tuple[EncoderServer, EncoderServer], data: object) -> None:
    """The image is encoded here, or the request fails if it came without one."""
    encoder, reader = servers
    params, asked = offered_once(encoder, "a"), request("r", [image("a", data=data)])
    asked.ec_transfer_params = params
    reader._pull, pull = raises, reader._pull
    assert reader.step(asked) is (data is not None)
    assert reader.scheduler.take_unavailable() == (set() if data else {"r"})
    reader._pull = pull
    reader.scheduler.ended(asked)
    assert reader.counts["unexpected"] == 1
    is_served(reader, offered_once(encoder, "b"), "b")


@pytest.mark.parametrize("method", ["save", "ticket", "collect"])
def test_what_cannot_be_offered_is_not(servers: tuple[EncoderServer, EncoderServer], method: str) -> None:
    encoder, _ = servers
    offers = encoder.scheduler._offers
    setattr(offers, method, raises)
    answer = encoder.answer(request("e", [image("a")]))
    assert answer == {} or method == "collect"
    delattr(offers, method)
    assert offered_once(encoder, "b").keys() == {"b"}


def test_blocks_whose_offers_cannot_be_ended_keep_their_item(
    servers: tuple[EncoderServer, EncoderServer],
) -> None:
    encoder, reader = servers
    params = offered_once(encoder, "a")
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
    params: Any = offered_once(encoder, "a")
    if field == "all":
        params = value
    elif field:
        params["a"][KEY][field] = value
    else:
        params["a"][KEY] = value
    is_served(reader, params, "a")
    assert "unexpected" not in reader.counts


def test_an_item_without_embeddings_is_not_taken() -> None:
    ours = ItemFormat("name", "float16", 2, 8)
    with pytest.raises(LayoutMismatch, match="no embeddings"):
        items.offered(
            {"ticket": "t", "width": 8, "format": "name", "dtype": "float16", "rows": 0}, "item", 0, ours
        )
