# SPDX-License-Identifier: Apache-2.0
"""Forty hostile handoffs, prompts and ids, and ten peers of other models, at managers that generate for others.

Everybody else's tokens stay right, nothing is left, and each refusal says why.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import recent_transformers  # noqa: F401
import torch
import transformers
from stepped_batching import MAX_NEW, VOCABULARY, batching, expected, reference, small_llama
from transformers_world import forged
from waiting import eventually
from window_models import make

from kvlink import WorkerConfig
from kvlink.errors import KVLinkError
from kvlink.integrations.transformers import Handoff, KVLinkHandoff, Prefix

pytestmark = [pytest.mark.verify, pytest.mark.timeout(300)]

WITHIN_S = 60.0
PULL_S = 2.0  # of owners that do not exist
PROMPT = tuple(range(3, 20))


class Peer:
    """A manager that generates on its own, with a handoff."""

    def __init__(self, name: str, model: Any = None, *, text: str = "", **options: Any) -> None:
        self.manager = batching(small_llama() if model is None else model, **{"num_blocks": 64, **options})
        config = WorkerConfig(timeout_s=PULL_S, lease_s=600.0)
        self.handoff = KVLinkHandoff(self.manager, name, model=text, config=config)
        self.manager.start()
        self.outputs: dict[str, Any] = {}

    def output(self, request_id: str) -> Any:
        while request_id not in self.outputs:
            assert self.manager.is_running(), "the loop has ended"
            output = self.manager.get_result(timeout=0.1)
            if output is not None:
                self.outputs[output.request_id] = output
        return self.outputs.pop(request_id)

    def prefill(self, prompt: tuple[int, ...] = PROMPT) -> Handoff:
        return self.handoff.prefill(prompt).result(WITHIN_S)

    def close(self) -> None:
        self.handoff.close()
        self.manager.stop(hard_stop=True)


@pytest.fixture(scope="module")
def peers() -> Iterator[tuple[Peer, Peer]]:
    with reference():
        peers = Peer("prefill"), Peer("decode", page_size=8)
        yield peers
        for peer in peers:
            peer.close()


@pytest.fixture(autouse=True)
def others(peers: tuple[Peer, Peer]) -> Iterator[None]:
    """Two requests of others run meanwhile, of which one is handed off. Nothing is left after them."""
    prefill, decode = peers
    theirs = random.Random(7).choices(range(VOCABULARY), k=21)
    decode.manager.add_request(theirs, "own", max_new_tokens=MAX_NEW)
    decode.handoff.submit(prefill.prefill(tuple(theirs[:9])), "handed off", max_new_tokens=MAX_NEW)
    yield
    assert list(decode.output("own").generated_tokens) == expected(tuple(theirs))
    assert list(decode.output("handed off").generated_tokens) == expected(tuple(theirs[:9]))
    for peer in peers:
        assert peer.manager.is_running()
        assert peer.handoff.stats().guarded == 0
    eventually(lambda: decode.handoff.stats().held_tables == 0)


def raw(change: Callable[[dict[str, Any]], Any]) -> Callable[[Handoff], Handoff]:
    """Returns what changes the JSON of a handoff."""

    def changed(handoff: Handoff) -> Handoff:
        fields = json.loads(handoff.to_json())
        return Handoff.from_json(json.dumps(change(fields)))

    return changed


def lied(**fields: Any) -> Callable[[Handoff], Handoff]:
    return lambda handoff: forged(handoff, **fields)


HANDOFFS: dict[str, Callable[[Handoff], Any]] = {
    "no object": raw(lambda _: [1, 2]),
    "a text for the prompt": raw(lambda fields: {**fields, "prompt": "text"}),
    "a nested prompt": raw(lambda fields: {**fields, "prompt": [[1]]}),
    "a fraction in the prompt": raw(lambda fields: {**fields, "prompt": [1.5]}),
    "a token that is no token": raw(lambda fields: {**fields, "first_token": None}),
    "a negative token": raw(lambda fields: {**fields, "first_token": -1}),
    "a log probability that is a text": raw(lambda fields: {**fields, "first_logprob": "0"}),
    "a log probability of 400 digits": raw(lambda fields: {**fields, "first_logprob": 10**400}),
    "a surplus field": raw(lambda fields: {**fields, "more": 1}),
    "a missing field": raw(lambda fields: {"prompt": fields["prompt"]}),
    "a ticket that is none": raw(lambda fields: {**fields, "ticket": "KVT1"}),
    "a ticket with a surrogate": raw(lambda fields: {**fields, "ticket": "\ud800"}),
    "a cut ticket": raw(lambda fields: {**fields, "ticket": fields["ticket"][:-8]}),
    "another prompt": raw(lambda fields: {**fields, "prompt": [1, 2, 3]}),
    "another first token": raw(lambda fields: {**fields, "first_token": (fields["first_token"] + 1) % 64}),
    "no Handoff": lambda handoff: handoff.to_json(),
    "a prefix": lambda handoff: Prefix(handoff.ticket, handoff.prompt),
    "an empty prompt": lied(prompt=()),
    "a token beyond the vocabulary": lied(first_token=VOCABULARY),
    "the largest token": lied(first_token=2**31 - 1),
    "a prompt beyond the vocabulary": lied(prompt=(VOCABULARY,) * len(PROMPT)),
    "a prompt that does not fit": lied(prompt=(1,) * 5000, ticket={"num_tokens": 5000}),
    "all tokens generated": lied(num_generated=len(PROMPT) - 1),
    "no tokens in the ticket": lied(ticket={"num_tokens": 0}),
    "2^32 - 1 tokens in the ticket": lied(ticket={"num_tokens": 2**32 - 1}),
    "no blocks": lied(ticket={"block_ids": array("I")}),
    "blocks beyond the cache": lied(ticket={"block_ids": array("I", [2**32 - 1] * 5)}),
    "two cache groups": lied(ticket={"block_ids": array("I", [4, 5, 6]), "group_sizes": (1, 2)}),
    "32 cache groups": lied(ticket={"block_ids": array("I", range(32)), "group_sizes": (1,) * 32}),
    "another epoch": lied(ticket={"epoch": 2**64 - 1}),
    "a rank that does not exist": lied(ticket={"rank": 9, "num_ranks": 4}),
    "65,535 ranks": lied(ticket={"rank": 3, "num_ranks": 65535}),
    "nothing ready": lied(ticket={"ready": 0}),
    "an owner of odd name": lied(ticket={"worker_id": "\0\n" * 100}),
    "an agent of another scheme": lied(ticket={"worker_id": "nobody", "agent": "xds:///x"}),
    "an agent that refuses": lied(ticket={"worker_id": "nobody", "agent": "127.0.0.1:1"}),
    "an agent of 512 bytes": lied(ticket={"worker_id": "nobody", "agent": "h" * 512}),
}


@pytest.mark.parametrize("name", HANDOFFS)
def test_a_hostile_handoff_is_refused_or_answered(peers: tuple[Peer, Peer], name: str) -> None:
    prefill, decode = peers
    honest = prefill.prefill()
    try:
        hostile = HANDOFFS[name](honest)
        request_id = decode.handoff.submit(hostile, max_new_tokens=MAX_NEW)
    except KVLinkError as error:
        assert str(error)
        assert honest.ticket not in str(error)
    else:
        output = decode.output(request_id)
        assert output.error or list(output.generated_tokens) == expected(PROMPT)
    try:
        prefill.handoff.abort(honest)
    except KVLinkError:
        assert not prefill.handoff._outgoing._offered


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new_tokens": "9"},
        {"max_new_tokens": -1},
        {"max_new_tokens": 2**40},
        {"eos_token_id": "stop"},
        {"eos_token_id": [1, "2"]},
        {"temperature": 0.0},
        {"unknown": 1},
        {"request_id": 5},
    ],
)
def test_hostile_arguments_are_refused(peers: tuple[Peer, Peer], arguments: dict[str, Any]) -> None:
    prefill, decode = peers
    honest = prefill.prefill()
    with pytest.raises(KVLinkError):
        decode.handoff.submit(honest, **{"max_new_tokens": 2, **arguments})
    prefill.handoff.abort(honest)


@pytest.mark.parametrize(
    "prompt", [(), (VOCABULARY,), (-1,), (2**63,), (1.5,), ("a",), (None,), ([1],), (1,) * 5000, 7, None]
)
def test_a_hostile_prompt_is_refused(peers: tuple[Peer, Peer], prompt: Any) -> None:
    for call in (peers[0].handoff.prefill, peers[0].handoff.share):
        with pytest.raises(KVLinkError):
            call(prompt).result(WITHIN_S)


@pytest.mark.parametrize(
    "change", [{"temperature": 0.0}, {"temperature": float("nan")}, {"top_k": 2**40}, {"top_p": -1.0}]
)
def test_sampling_that_would_raise_in_a_batch_is_refused(change: dict[str, Any]) -> None:
    manager = small_llama().init_continuous_batching(
        transformers.GenerationConfig(
            do_sample=True, temperature=0.5, top_k=5, top_p=0.5, max_new_tokens=3, eos_token_id=-1
        ),
        transformers.generation.ContinuousBatchingConfig(
            page_size=4, num_blocks=16, max_batch_tokens=16, per_request_processors=True
        ),
    )
    with KVLinkHandoff(manager, "samples") as handoff:
        manager.start()
        with pytest.raises(KVLinkError, match=next(iter(change))):
            handoff.prefill(PROMPT, **change)
        assert handoff.prefill(PROMPT, temperature=0.7, top_k=3, top_p=0.9).result(WITHIN_S).first_token >= 0
    manager.stop()


MODELS: dict[str, Callable[[], Peer]] = {
    "fewer layers": lambda: Peer("fewer", small_llama(num_hidden_layers=1)),
    "more layers": lambda: Peer("more", small_llama(num_hidden_layers=3)),
    "other heads": lambda: Peer("heads", small_llama(num_key_value_heads=1)),
    "other head size": lambda: Peer("size", small_llama(head_dim=32)),
    "bfloat16": lambda: Peer("dtype", small_llama(dtype=torch.bfloat16)),
    "a larger vocabulary": lambda: Peer("vocabulary", small_llama(vocab_size=4096)),
    "another name": lambda: Peer("name", text="meta-llama/Llama@1"),
    "windows": lambda: Peer("windows", make("sliding", 24), page_size=16),
    "windows in some layers": lambda: Peer("mixed", make("mixed", 24), page_size=16),
    "another page size": lambda: Peer("pages", page_size=32),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_peer_of_another_model_is_refused_and_one_of_another_page_size_served(
    peers: tuple[Peer, Peer], name: str
) -> None:
    decode, other = peers[1], MODELS[name]()
    try:
        handoff = Handoff.from_json(other.prefill().to_json())
        try:
            request_id = decode.handoff.submit(handoff, max_new_tokens=MAX_NEW)
        except KVLinkError as error:
            assert "same" in str(error) or "model" in str(error)
            return
        output = decode.output(request_id)
        if name == "another page size":
            assert list(output.generated_tokens) == expected(PROMPT)
        else:
            assert output.error
    finally:
        other.close()
