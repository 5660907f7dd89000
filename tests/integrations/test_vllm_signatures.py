# SPDX-License-Identifier: Apache-2.0
"""Handoffs of a tenant with KVLINK_TICKET_KEYS: a router passes them on, nobody changes them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlink.control.security.tickets import TicketKeys
from kvlink.errors import ConfigError
from kvlink.integrations.vllm.model.caches import CacheGroup
from kvlink.integrations.vllm.wire import handoff
from kvlink.integrations.vllm.wire.handoff import KEY, Handoff, Owner, prompt_digest
from kvlink.ticket import LeaseSeat

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
    for ticket in read.tickets([CacheGroup(1, 16, 1, 16)]):
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
