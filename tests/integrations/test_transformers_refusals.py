# SPDX-License-Identifier: Apache-2.0
"""Calls that transformers' generation loop would not survive, or would mix up, are refused before they reach it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import recent_transformers  # noqa: F401
import transformers

from kvlink.errors import ConfigError
from kvlink.integrations.transformers import Handoff, KVLinkHandoff
from kvlink.integrations.transformers.demo import tiny_llama
from kvlink.integrations.transformers.support import check_manager

pytestmark = [pytest.mark.verify, pytest.mark.timeout(300)]

NUM_NEW, WITHIN_S = 16, 60.0


class Peer:
    """A manager with a handoff, in this process."""

    def __init__(self, name: str, page_size: int, num_blocks: int) -> None:
        self.manager = tiny_llama().init_continuous_batching(
            transformers.GenerationConfig(do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=-1),
            transformers.generation.ContinuousBatchingConfig(
                page_size=page_size, num_blocks=num_blocks, max_batch_tokens=64
            ),
        )
        self.handoff = KVLinkHandoff(self.manager, name)
        self.manager.start()

    def close(self) -> None:
        self.handoff.close()
        self.manager.stop()

    def prefill(self, prompt: list[int], request_id: str | None = None) -> Handoff:
        return self.handoff.prefill(prompt, request_id).result(WITHIN_S)

    def computed(self, prompt: list[int], **options: Any) -> list[int]:
        return self.tokens(self.manager.add_request(prompt, **options))

    def tokens(self, request_id: str) -> list[int]:
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            output = self.manager.get_result(timeout=1.0)
            if output is not None:
                assert (output.request_id, output.error) == (request_id, None)
                return list(output.generated_tokens)
        raise AssertionError(f"{request_id} did not finish")


@pytest.fixture(scope="module")
def peers() -> Iterator[tuple[Peer, Peer]]:
    """The second has a cache of 128 tokens."""
    peers = Peer("large", 16, 64), Peer("small", 8, 16)
    yield peers
    for peer in peers:
        peer.close()


def prompt_of(num_tokens: int) -> list[int]:
    return random.Random(num_tokens).choices(range(256), k=num_tokens)


def test_a_prompt_that_does_not_fit_costs_nobody_anything(peers: tuple[Peer, Peer]) -> None:
    """transformers ends its loop, and every request with it, for one that does not fit."""
    large, small = peers
    with pytest.raises(ConfigError, match=r"request .*: 129 tokens do not fit the cache of 128"):
        small.handoff.prefill(prompt_of(129))
    whole = small.prefill(prompt_of(128))
    assert whole.first_token == large.computed(prompt_of(128), max_new_tokens=1)[0]
    small.handoff.abort(whole)


def test_an_answer_that_does_not_fit_is_refused_with_its_prompt(peers: tuple[Peer, Peer]) -> None:
    """Its last token is not stored."""
    large, small = peers
    prompt = prompt_of(120)
    handoff = large.prefill(prompt)
    refused = small.handoff.stats().refused
    with pytest.raises(ConfigError, match=r"request .*: 129 tokens do not fit"):
        small.handoff.submit(handoff, max_new_tokens=10)
    with pytest.raises(ConfigError, match=r"request .*: 135 tokens do not fit"):
        small.handoff.submit(handoff)
    assert small.handoff.stats().refused == refused + 2
    assert small.tokens(small.handoff.submit(handoff, max_new_tokens=9)) == large.computed(prompt)[:9]


@pytest.mark.parametrize("then", ["submit", "prefill"])
def test_an_id_that_is_taken_is_refused_until_its_request_has_ended(
    peers: tuple[Peer, Peer], then: str
) -> None:
    """Also before the generation thread has seen the first."""
    large, small = peers
    prompt = prompt_of(40)
    handoff, expected = large.prefill(prompt), large.computed(prompt)
    with small.manager.pause():
        small.handoff.submit(handoff, "one")
        call = {"submit": small.handoff.submit, "prefill": small.handoff.prefill}[then]
        with pytest.raises(ConfigError, match="request one already runs here"):
            call(handoff if then == "submit" else [1, 2, 3], "one")  # type: ignore[operator]
    assert small.tokens("one") == expected
    assert small.tokens(small.handoff.submit(large.prefill(prompt), "one")) == expected
    small.handoff.abort(small.prefill([1, 2, 3], "one"))


def test_a_prefill_takes_its_id_too(peers: tuple[Peer, Peer]) -> None:
    large, small = peers
    handoff = large.prefill(prompt_of(30))
    with small.manager.pause():
        future = small.handoff.prefill(prompt_of(40), "one")
        with pytest.raises(ConfigError, match="request one already runs here"):
            small.handoff.prefill(prompt_of(20), "one")
        with pytest.raises(ConfigError, match="request one already runs here"):
            small.handoff.submit(handoff, "one")
    small.handoff.abort(future.result(WITHIN_S))
    large.handoff.abort(handoff)


def test_other_attention_types_are_refused_by_name() -> None:
    """transformers refuses them, too, unless a later release has them."""
    model = tiny_llama()
    config = transformers.generation.ContinuousBatchingConfig(page_size=16, num_blocks=8, max_batch_tokens=16)
    manager = model.init_continuous_batching(continuous_batching_config=config)
    model.config.layer_types = ["full_attention", "chunked_attention"] * 2
    with pytest.raises(ConfigError, match="this model also has chunked_attention"):
        KVLinkHandoff(manager, "refused")


def test_what_another_version_lacks_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"transformers .* lacks .*ContinuousBatchingManager\.pause.* ran with"
    ):
        check_manager(object())
