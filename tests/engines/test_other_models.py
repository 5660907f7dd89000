# SPDX-License-Identifier: Apache-2.0
"""A prefill server of one model, and decode servers of others of the same shape: none takes the cache of another model.

vLLM computes what it refuses, and answers with the tokens of its own model. SGLang fails the request.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from connectors import kv_transfer
from pair import Answer, ask, flags, prompt
from servers import ENGINES, MODELS, Launch, Server, free_port, post, running, vllm
from sglang_stack import PREFILL, Stack, decode_flags, sglang

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]
_ASK = {"do_remote_decode": True, "do_remote_prefill": False}
_LORA = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules")


@dataclass(frozen=True)
class Other:
    """Decode's model, what it is started with, and the word in the log of a refusal; "" if it takes the cache."""

    model: str
    refused: str
    flags: tuple[str, ...] = ()
    extra: Mapping[str, Any] | None = None


VLLM = {
    "a-fine-tune": Other("llama-tuned", "weights is"),
    "another-base": Other("llama-base", "weights is"),
    "another-revision": Other("llama-revision", "weights is"),
    "another-theta": Other("llama-theta", "rope is"),
    "an-override": Other(
        "llama", "rope is",
        ("--hf-overrides", '{"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}'),
    ),
    "another-norm": Other("llama-norm", "rms_norm_eps is"),
    "a-copy": Other("llama-copy", ""),
    "sharded": Other("llama-sharded", ""),
}  # fmt: skip
SGLANG = {
    "a-fine-tune": Other("llama-tuned", "weights is"),
    "a-scaled-rope": Other("llama-scaled", "rope is"),
    "sharded": Other("llama-sharded", ""),
}


def _vllm(role: str, model: str, *more: str, **extra: Any) -> Launch:
    config = kv_transfer("KVLinkConnector", lease_s=20, **extra)
    return vllm(f"{role}-identity", model, config, (*flags("llama"), *more))


def _variants(engine: str, script: str = "other_models.py", *names: str) -> None:
    python = ENGINES / engine / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {engine}: run .ci/engines {engine}")
    subprocess.run([str(python), str(Path(__file__).with_name(script)), str(MODELS), *names], check=True)


@pytest.fixture(scope="module")
def prefill() -> Iterator[Server]:
    _variants("vllm")
    _variants("vllm", "variants.py", "adapter-a", "adapter-b")
    shutil.copytree(MODELS / "adapter-a", MODELS / "adapter-copy", dirs_exist_ok=True)
    adapter = json.dumps({"name": "adapter", "path": str(MODELS / "adapter-a")})
    with running([_vllm("prefill", "llama", *_LORA, adapter)]) as (server,):
        yield server


def _handed_off(prefill: Server, decode: Server, model: str, tokens: list[int], at_prefill: str) -> Answer:
    first = ask(prefill.url, at_prefill, tokens, 1, kv_transfer_params=dict(_ASK))
    assert first.status == 200, first.body
    assert first.handoff, first.body
    return ask(decode.url, model, tokens, kv_transfer_params=first.handoff)


def _check(prefill: Server, decode: Server, model: str, refused: str, at_prefill: str = "llama") -> None:
    """Twice: the first contact compares cards, and the next ones tickets."""
    for number in range(2):
        loads = decode.metric("vllm:kvlink_transfer_seconds_count")
        tokens = prompt(f"identity {model} {number}", 300)
        answer = _handed_off(prefill, decode, model, tokens, at_prefill)
        taken = decode.metric("vllm:kvlink_transfer_seconds_count") - loads
        post(f"{decode.url}/reset_prefix_cache", {})
        assert answer.status == 200, answer.body
        assert (answer.tokens, taken) == (ask(decode.url, model, tokens).tokens, not refused)
    assert not refused or decode.num_logged(refused) >= 1


@pytest.mark.parametrize("other", VLLM.values(), ids=VLLM)
def test_vllm(prefill: Server, other: Other) -> None:
    with running([_vllm("decode", other.model, *other.flags, **(other.extra or {}))]) as (decode,):
        _check(prefill, decode, other.model, other.refused)


def test_vllm_reloads_other_weights_while_it_runs() -> None:
    """First decode, which then refuses the tickets of prefill, and then prefill."""
    _variants("vllm")
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(MODELS / "llama-tuned")}}
    launches = [
        _vllm("prefill", "llama"),
        _vllm("decode", "llama"),
        vllm("plain", "llama-tuned", None, flags("llama")),
    ]
    with running(launches) as (own_prefill, decode, plain):
        _check(own_prefill, decode, "llama", "")
        for server, is_taken in ((decode, 0), (own_prefill, 1)):
            assert post(f"{server.url}/collective_rpc", reload)[0] == 200
            ask(server.url, "llama", prompt("a step", 3), 1)  # the scheduler learns of it with the next step
            post(f"{server.url}/reset_prefix_cache", {})
            tokens = prompt(f"reloaded {is_taken}", 300)
            loads = decode.metric("vllm:kvlink_transfer_seconds_count")
            answer = _handed_off(own_prefill, decode, "llama", tokens, "llama")
            assert answer.tokens == ask(plain.url, "llama-tuned", tokens).tokens
            assert decode.metric("vllm:kvlink_transfer_seconds_count") - loads == is_taken
        assert decode.num_logged("the weights were changed") == 1


@pytest.mark.parametrize(
    ("adapter", "refused"), [("adapter-b", "another prompt"), ("adapter-copy", "")], ids=["other", "copy"]
)
def test_an_adapter_is_its_content_and_not_its_name(prefill: Server, adapter: str, refused: str) -> None:
    module = json.dumps({"name": "adapter", "path": str(MODELS / adapter)})
    with running([_vllm("decode", "llama", *_LORA, module)]) as (decode,):
        _check(prefill, decode, "adapter", refused, at_prefill="adapter")


@pytest.fixture(scope="module")
def sglang_prefill() -> Iterator[tuple[Server, int]]:
    _variants("sglang")
    port = free_port()
    with running([sglang("sglang-prefill", *PREFILL, "--disaggregation-bootstrap-port", str(port))]) as (
        server,
    ):
        yield server, port


@pytest.mark.parametrize("other", SGLANG.values(), ids=SGLANG)
def test_sglang(sglang_prefill: tuple[Server, int], other: Other) -> None:
    prefill, port = sglang_prefill
    model = ("--model-path", str(MODELS / other.model))
    launches = [sglang("sglang-decode", *decode_flags(port), *model), sglang("sglang-plain", *model)]
    with running(launches) as (decode, plain):
        stack = Stack([prefill, decode, decode, plain], port)
        tokens = prompt(f"sglang {other.model}", 100)
        status, answer = stack.handed_off(tokens)
        if other.refused:
            assert status == 500, answer
            assert other.refused in json.dumps(answer)
        else:
            assert (status, answer["output_ids"]) == (200, stack.expected(tokens))


def test_sglang_loads_other_weights_while_it_runs(sglang_prefill: tuple[Server, int]) -> None:
    prefill, port = sglang_prefill
    plain_model = ("--model-path", str(MODELS / "llama-tuned"))
    launches = [sglang("sglang-decode", *decode_flags(port)), sglang("sglang-plain", *plain_model)]
    with running(launches) as (decode, plain):
        stack = Stack([prefill, decode, decode, plain], port)
        for server, is_taken in ((decode, False), (prefill, True)):
            update = {"model_path": str(MODELS / "llama-tuned")}
            assert post(f"{server.url}/update_weights_from_disk", update, 300)[1]["success"]
            tokens = prompt(f"sglang updated {is_taken}", 100)
            status, answer = stack.handed_off(tokens)
            assert status == (200 if is_taken else 500), answer
            assert not is_taken or answer["output_ids"] == stack.expected(tokens)
            assert is_taken or "another model" in json.dumps(answer)
