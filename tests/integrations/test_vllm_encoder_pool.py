# SPDX-License-Identifier: Apache-2.0
"""The pool of encoder outputs: which items may be evicted, and how processes share its memory."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

from encoder_server import ROWS, EncoderServer, encoded, image, request  # isort: skip
from waiting import eventually

from kvlink.errors import ConfigError
from kvlink.integrations.vllm.encoder.memory import EncoderMemory, MemoryShape
from kvlink.integrations.vllm.encoder.settings import EncoderSettings


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
