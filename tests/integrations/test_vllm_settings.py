# SPDX-License-Identifier: Apache-2.0
"""The configuration that vLLM gives, and the parts of vLLM that kvlink relies on."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm_server import ASK_PREFILL, Server, request

from kvlink.control.security.tickets import TicketKeys
from kvlink.errors import ConfigError
from kvlink.integrations.vllm import make_known
from kvlink.integrations.vllm.model.caches import CacheGroup, TokenUnit
from kvlink.integrations.vllm.settings import Settings, streams_from
from kvlink.integrations.vllm.wire import handoff
from kvlink.integrations.vllm.wire.handoff import KEY, Handoff, Owner, prompt_digest
from kvlink.ticket import LeaseSeat


def test_defaults_suit_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVLINK_LEASE_S", "KVLINK_LEASE_SLOTS", "KVLINK_INLINE_US"):
        monkeypatch.delenv(name, raising=False)
    settings = Settings.of({})
    assert (settings.seats, settings.worker.inline_us, settings.worker.lease_s) == (8, 0, 30.0)
    assert settings.worker.lease_slots > 1000 * settings.seats


def test_what_is_given_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLINK_LEASE_S", "7")
    monkeypatch.setenv("KVLINK_TRANSPORTS", "tcp")
    settings = Settings.of({"lease_s": 5, "seats": 2, "streaming_from_tokens": 0})
    assert (settings.seats, settings.worker.lease_s, settings.worker.transports) == (2, 5, "tcp")
    assert settings.streaming_from_tokens == 0


@pytest.mark.parametrize(
    ("least", "chunk", "most_of_one", "expected"),
    [(0, 1024, 0, 1025), (2048, 1024, 0, 2048), (0, 8192, 512, 513), (0, 512, 8192, 513)],
)
def test_prompts_of_one_chunk_are_not_streamed(
    least: int, chunk: int, most_of_one: int, expected: int
) -> None:
    scheduler = SimpleNamespace(max_num_batched_tokens=chunk, long_prefill_token_threshold=most_of_one)
    assert streams_from(Settings.of({"streaming_from_tokens": least}), scheduler) == expected


def test_streaming_is_predicted_unless_it_is_always() -> None:
    chosen = [
        Settings.of(extra).streams_always
        for extra in ({}, {"streaming": "predicted"}, {"streaming": "always"})
    ]
    assert chosen == [False, False, True]


def test_answers_have_lease_slots_of_their_own() -> None:
    slots = [Settings.of({"lease_slots": 4096, **extra}) for extra in ({}, {"bidirectional": True})]
    assert [settings.pinning_slots for settings in slots] == [4096, 3584]
    assert [settings.bidirectional for settings in slots] == [False, True]
    assert Settings.of({"bidirectional": True, "answer_s": 5}).answer_s == 5


def test_the_environment_wins_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLINK_LEASE_SLOTS", "800")
    monkeypatch.setenv("KVLINK_INLINE_US", "4096")
    worker = Settings.of({}).worker
    assert (worker.lease_slots, worker.inline_us) == (800, 4096)
    assert Settings.of({"lease_slots": 900}).worker.lease_slots == 900


@pytest.mark.parametrize("name", ["tls_ca", "tls_hosts", "token_file", "ticket_keys", "insecure"])
def test_what_the_scheduler_needs_too_belongs_into_the_environment(name: str) -> None:
    with pytest.raises(ConfigError, match=f"set KVLINK_{name.upper()} there"):
        Settings.of({name: "x"})


@pytest.mark.parametrize(
    "extra",
    [
        {"seats": 0},
        {"seats": "8"},
        {"streaming_from_tokens": -1},
        {"streaming_from_tokens": True},
        {"streaming": "never"},
        {"bidirectional": "yes"},
        {"bidirectional": 1},
        {"answer_s": 0},
        {"answer_s": 1.5},
        {"lease_s": -1},
        {"nics": "a b"},
    ],
)
def test_nonsense_is_refused(extra: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Settings.of(extra)


def test_unknown_names_are_said(caplog: pytest.LogCaptureFixture) -> None:
    Settings.of({"lease": 5, "log": "info"})
    assert "kvlink does not know lease, log" in caplog.text


PROMPT = list(range(100, 110))  # two whole blocks and a half
OURS, THEIRS = [5, 6, 7], [3, 9, 1]


def test_nothing_is_loaded_into_blocks_that_a_launched_step_uses() -> None:
    with Server("p") as prefill, Server("d") as decode:
        step = SimpleNamespace(has_ended=False)
        step.query = lambda: step.has_ended
        decode.launched = step
        _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), THEIRS)
        before = [decode.block("layer.0", block).clone() for block in OURS]
        decode.load(request("x", PROMPT, params), OURS)
        for _ in range(20):
            decode.step()
        assert "x" not in decode.received
        assert all(decode.block("layer.0", at).equal(was) for at, was in zip(OURS, before, strict=True))
        step.has_ended = True
        decode.step_until(lambda: "x" in decode.received)
        assert not decode.failed
        for ours, theirs in zip(OURS, THEIRS, strict=True):
            assert decode.block("layer.0", ours).equal(prefill.block("layer.0", theirs))


SAMPLE = Handoff(
    "r", (Owner("w", 5, "127.0.0.1:1"),), (LeaseSeat(1, 1011, 1012),), (array("I", [4, 0, 7]),), (16,), 33,
    prompt_digest([1, 2]), 30.0,
)  # fmt: skip


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TicketKeys]:
    file = tmp_path / "keys"
    file.write_text("k" * 40)
    monkeypatch.setenv("KVLINK_TICKET_KEYS", str(file))
    handoff._keys.cache_clear()
    yield TicketKeys.of_file(file)
    handoff._keys.cache_clear()


def test_it_survives_a_router_and_its_tickets_are_signed(keys: TicketKeys) -> None:
    read = Handoff.from_params(json.loads(json.dumps({KEY: SAMPLE.to_params()})))
    assert read == SAMPLE
    with pytest.raises(AttributeError):
        read.num_tokens = 1  # type: ignore[misc]
    for ticket in read.tickets([CacheGroup(16, 1, (TokenUnit(16, is_block=True),))]):
        keys.checked(ticket)


CHANGES: list[dict[str, Any]] = [
    {"owners": [["w", "1", "10.6.6.6:1"]]},
    {"groups": ["AAAA"]},
    {"block_tokens": "32"},
    {"prompt": "0" * 32},
    {"new": "field"},
    {"signature": "0" * 32},
    {"signature": ""},
    {"signature": 1},
    {"signature": "\ud800"},
]


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_can_be_changed(keys: TicketKeys, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"not signed by any of this tenant's keys|no handoff of kvlink"):
        Handoff.from_params({KEY: SAMPLE.to_params() | change})


@pytest.mark.parametrize("given", [None, [], "text", {}, {"ticket": "x"}])
def test_what_is_no_handoff_is_refused(keys: TicketKeys, given: Any) -> None:
    with pytest.raises(ConfigError):
        Handoff.from_params({KEY: given})


NAME = "dynamo.vllm.kv_connector_protocols"


def registry(monkeypatch: pytest.MonkeyPatch, **known: str) -> dict[str, str]:
    module = ModuleType(NAME)
    module.KV_CONNECTOR_PROTOCOLS = known  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, NAME, module)
    return known


def test_ours_is_carried_as_nixls(monkeypatch: pytest.MonkeyPatch) -> None:
    known = registry(monkeypatch, NixlConnector="pulls", MooncakeConnector="pushes")
    make_known()
    make_known()
    assert known == {"NixlConnector": "pulls", "MooncakeConnector": "pushes", "KVLinkConnector": "pulls"}


def test_what_dynamo_says_itself_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    known = registry(monkeypatch, NixlConnector="pulls", KVLinkConnector="its own")
    make_known()
    assert known["KVLinkConnector"] == "its own"


@pytest.mark.parametrize("known", [{}, {"MooncakeConnector": "pushes"}])
def test_without_nixl_nothing_is_said(monkeypatch: pytest.MonkeyPatch, known: dict[str, str]) -> None:
    known = registry(monkeypatch, **known)
    make_known()
    assert "KVLinkConnector" not in known


def test_elsewhere_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    make_known()
    assert NAME not in sys.modules
