# SPDX-License-Identifier: Apache-2.0
"""Prefixes that servers find in each other's caches: the right bytes are pulled, or the prompt is computed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

import torch
from waiting import eventually

from vllm_server import ASK_PREFILL, NUM_BLOCKS, Server, request  # isort: skip

from kvlink.coordinator import Coordinator
from kvlink.errors import ConfigError
from kvlink.integrations.vllm.chats import prefix_lookups
from kvlink.integrations.vllm.chats.prefix_lookups import prefix_digests, shared_span
from kvlink.integrations.vllm.settings import Settings
from kvlink.integrations.vllm.wire.stream_timing import LoadCost
from kvlink.runtime.background import ControlThread

SPAN = 8
"""Two blocks."""
SYSTEM = list(range(100, 116))
FIRST, SECOND = [*SYSTEM, 200, 201, 202], [*SYSTEM, 300, 301]
LAYERS = ("layer.0", "layer.1")


@pytest.fixture(autouse=True)
def short_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_lookups, "_SHARED_TOKENS", SPAN)


@pytest.fixture
def coordinator() -> Iterator[str]:
    control, coordinator = ControlThread.shared(), Coordinator()
    yield control.run(coordinator.start())
    control.run(coordinator.close())


@pytest.fixture
def servers(coordinator: str) -> Iterator[tuple[Server, Server]]:
    with (
        Server("a", coordinator=coordinator, shares=True) as one,
        Server("b", coordinator=coordinator, shares=True) as other,
    ):
        for server in (one, other):
            measured(server)
        yield one, other


def measured(server: Server, tokens_per_s: float = 100.0) -> None:
    """The server knows the time of its prefills."""
    lookups = server.scheduler.turns.lookups
    assert lookups is not None
    for num_tokens in (100, 200, 300):
        lookups.meter.note(num_tokens, num_tokens / tokens_per_s)


def computes(
    server: Server, blocks: list[int], name: str = "first", params: Any = None, **changes: Any
) -> None:
    """The server computes a prompt and an answer of two tokens, and lets others find it."""
    server.pool.cache(*blocks)
    asked = request(name, FIRST, params)
    asked.__dict__.update(changes)
    server.answer(asked, [203, 204], blocks)


def matched(server: Server, asked: Any, computed: int = 0) -> int:
    """Asks until it is known."""
    server.scheduler.arrived(asked)
    output: list[int] = []

    def known() -> bool:
        count, in_background = server.scheduler.num_matched(asked, computed)
        if count is None:
            return False
        assert in_background is (count > 0)
        output.append(count)
        return True

    eventually(known)
    return output[0]


def found(server: Server, tokens: list[int] = SECOND, **changes: Any) -> int:
    """Publishing does not block, so asks with requests until one is answered with a prefix."""
    numbers = iter(range(1_000_000))

    def once() -> int:
        asked = request(f"found {next(numbers)}", tokens, None)
        asked.__dict__.update(changes)
        return matched(server, asked)

    return eventually(once)


def pulls(server: Server, asked: Any, blocks: list[int], count: int) -> bool:
    server.scheduler.allocated(asked, (blocks,), count)
    server.step_until(lambda: asked.request_id in server.received)
    return asked.request_id not in server.failed


def counts(server: Server) -> dict[str, int]:
    stats = server.ranks[0].take_stats()
    return server.scheduler.turns.take_counts() | (stats["turns"] if stats else {})


@pytest.mark.parametrize("params", [None, ASK_PREFILL])
def test_a_prefix_is_pulled_from_the_server_that_computed_it(
    servers: tuple[Server, Server], params: dict[str, Any] | None
) -> None:
    one, other = servers
    if params is None:
        computes(one, [3, 9, 1, 7, 2])
    else:
        one.pool.cache(3, 9, 1, 7)
        assert one.prefill(request("first", FIRST, params), [3, 9, 1, 7, 2])[0], "it is handed off, too"
    assert found(other) == 16
    asked = request("second", SECOND, params)
    assert matched(other, asked, computed=8) == 8
    before = other.block("layer.0", 5).clone()
    assert pulls(other, asked, [5, 6, 8, 10, 11], 8)
    for layer in LAYERS:
        assert other.block(layer, 8).equal(one.block(layer, 1))
        assert other.block(layer, 10).equal(one.block(layer, 7))
    assert other.block("layer.0", 5).equal(before)
    assert counts(other)["loaded"] == 1
    assert other.scheduler.num_matched(asked, 16) == (0, False), "the rest is computed"


def test_what_the_owner_gives_away_is_computed(servers: tuple[Server, Server]) -> None:
    one, other = servers
    computes(one, [3, 9, 1, 7, 2])
    assert found(other) == 16
    asked = request("second", SECOND, None)
    assert matched(other, asked) == 16
    one.pool.give_away(7)
    one.step(compute=lambda: [tensor[7].fill_(255) for tensors in one.caches for tensor in tensors.values()])
    assert not pulls(other, asked, [5, 6, 8, 10, 11], 16)
    assert counts(other)["evicted"] == 1
    assert other.scheduler.num_matched(asked, 0) == (0, False), "it is asked for once"
    eventually(lambda: matched(other, request("third", SECOND, None)) == 0)


def test_reset_ends_what_is_shared(servers: tuple[Server, Server]) -> None:
    one, other = servers
    computes(one, [3, 9, 1, 7, 2])
    assert found(other) == 16
    one.pool.reset_prefix_cache()
    one.step()
    numbers = iter(range(1_000_000))
    eventually(lambda: matched(other, request(f"third {next(numbers)}", SECOND, None)) == 0)


def test_a_pull_that_does_not_pay_is_not_made(servers: tuple[Server, Server]) -> None:
    one, other = servers
    computes(one, [3, 9, 1, 7, 2])
    assert found(other) == 16
    counts(other)
    other.scheduler.decisions.learn({"a-0": LoadCost(10.0, 0.0)})
    assert matched(other, request("slow", SECOND, None)) == 0
    assert counts(other) == {"computed_is_faster": 1}
    other.scheduler.decisions.learn({"a-0": LoadCost(0.0, 1e-6)})
    assert matched(other, request("fast", SECOND, None)) == 16


def test_nothing_is_pulled_before_the_time_of_a_prefill_is_known(coordinator: str) -> None:
    with (
        Server("a", coordinator=coordinator, shares=True) as one,
        Server("b", coordinator=coordinator, shares=True) as other,
    ):
        computes(one, [3, 9, 1, 7, 2])
        numbers = iter(range(1_000_000))

        def declined() -> bool:
            assert matched(other, request(f"early {next(numbers)}", SECOND, None)) == 0
            return "computed_is_faster" in counts(other)

        eventually(declined)


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_salt": "theirs"},
        {"lora_request": SimpleNamespace(lora_name="a", lora_path="/x/a", lora_int_id=1)},
        {"prompt_embeds": torch.zeros(1)},
    ],
)
def test_what_the_tokens_do_not_tell_keeps_prompts_apart(
    servers: tuple[Server, Server], changes: dict[str, Any]
) -> None:
    one, other = servers
    computes(one, [3, 9, 1, 7, 2])
    assert found(other) == 16
    asked = request("different", SECOND, None)
    asked.__dict__.update(changes)
    assert matched(other, asked) == 0


def test_a_server_whose_prefix_could_not_be_pulled_is_asked_last(
    servers: tuple[Server, Server], coordinator: str
) -> None:
    one, other = servers
    with Server("c", coordinator=coordinator, shares=True) as third:
        third.pool.cache(3, 9, 1)
        third.answer(request("shorter", [*SYSTEM[:SPAN], 1, 2, 3], None), [4, 5], [3, 9, 1, 7])
        assert found(other) == SPAN
        computes(one, [3, 9, 1, 7, 2])
        numbers = itertools.count()
        eventually(lambda: matched(other, request(f"look {next(numbers)}", SECOND, None)) == 16)
        one.ranks[0]._worker.revoke([3, 9, 1, 7])
        for prefix, is_pulled in ((16, False), (SPAN, True), (SPAN, True)):
            asked = request(f"of {prefix} {is_pulled}", SECOND, None)
            assert matched(other, asked) == prefix
            assert pulls(other, asked, [5, 6, 8, 10][: prefix // 4], prefix) is is_pulled
            other.scheduler.finished(asked, ([],), False)


def test_servers_of_another_model_find_nothing(servers: tuple[Server, Server], coordinator: str) -> None:
    one, other = servers
    with Server("c", coordinator=coordinator, shares=True, model="another") as third:
        measured(third)
        computes(one, [3, 9, 1, 7, 2])
        assert found(other) == 16
        assert matched(third, request("second", SECOND, None)) == 0


def test_the_oldest_prefix_makes_room(servers: tuple[Server, Server]) -> None:
    """At most three are published."""
    one, other = servers
    prompts = [[*range(1000 * number, 1000 * number + 16), 1] for number in range(1, 6)]
    for number, prompt in enumerate(prompts):
        one.pool.cache(3, 9, 1, 7)
        one.answer(request(f"p{number}", prompt, None), [5, 6], [3, 9, 1, 7, 2])
    assert found(other, prompts[-1]) == 16
    assert [matched(other, request(f"q{n}", [*prompt, 9], None)) for n, prompt in enumerate(prompts)] == [
        0, 0, 16, 16, 16
    ]  # fmt: skip


def test_a_coordinator_that_does_not_answer_costs_a_moment(coordinator: str) -> None:
    with Server("a", coordinator=coordinator, shares=True) as alone:
        peers = alone.scheduler.turns.peers
        assert peers is not None
        peers._coordinator = "127.0.0.1:1"
        assert matched(alone, request("second", SECOND, None)) == 0
        assert counts(alone) == {"directory_failed": 1}


def test_a_request_that_ends_while_it_is_looked_up(servers: tuple[Server, Server]) -> None:
    one, _ = servers
    asked = request("second", SECOND, None)
    one.scheduler.arrived(asked)
    one.scheduler.num_matched(asked, 0)
    assert one.scheduler.finished(asked, ([],), False) == (False, None)
    assert one.scheduler.num_matched(asked, 0) == (0, False)


def test_steps_measure_the_time_of_a_prefill(servers: tuple[Server, Server]) -> None:
    lookups = servers[0].scheduler.turns.lookups
    assert lookups is not None
    lookups.meter.__init__()  # type: ignore[misc]
    now = 0.0
    lookups._clock = lambda: now
    for num_tokens in (100, 300, 200, 10, 400):
        lookups.step_began(num_tokens)
        now += 0.5 + num_tokens / 1000 if num_tokens > 10 else 60.0  # a step of decoding
        lookups.step_ended()
        now += 7.0
    rate = lookups.meter.rate()
    assert rate is not None
    assert (rate.tokens_per_s, rate.start_s) == (pytest.approx(1000), pytest.approx(0.5))


def test_spans_are_the_same_for_block_sizes_that_divide_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [shared_span(block_tokens) for block_tokens in (1, 16, 128, 256, 48, 512)] == [
        256, 256, 256, 256, 48, 512
    ]  # fmt: skip


def test_a_cache_salt_is_part_of_each_digest() -> None:
    plain, salted = request("r", SYSTEM, None), request("r", SYSTEM, None)
    salted.cache_salt = "x"
    assert not set(prefix_digests(plain, 16, 4)) & set(prefix_digests(salted, 16, 4))


def test_it_needs_a_coordinator() -> None:
    with pytest.raises(ConfigError, match="share_prefixes needs the directory of a coordinator"):
        Settings.of({"share_prefixes": True})
    with pytest.raises(ConfigError, match="share_prefixes='yes' must be true or false"):
        Settings.of({"share_prefixes": "yes"})
    settings = Settings.of({"share_prefixes": True, "coordinator": "127.0.0.1:7400"})
    assert settings.offers_softly
    assert settings.pinning_slots < settings.worker.lease_slots
    assert NUM_BLOCKS == 16
