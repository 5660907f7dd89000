# SPDX-License-Identifier: Apache-2.0
"""`kv_connector_extra_config` wins over the environment; what is wrong in it is said."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvlink.errors import ConfigError
from kvlink.integrations.vllm.settings import Settings, streams_from


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
