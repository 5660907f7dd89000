# SPDX-License-Identifier: Apache-2.0
"""The messages between processes of transformers: what is malformed, or made for other tokens, is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlink.errors import ConfigError
from kvlink.integrations.transformers.handoff_message import Handoff, Prefix, fingerprint, prefix_mark

_FIELDS = ["ticket", "prompt", "first_token", "first_logprob", "num_generated", "earlier_logprobs", "tokens"]
_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers())


@pytest.mark.parametrize(
    "change",
    [
        {"ticket": 5},
        {"ticket": "KVT1"},
        {"prompt": "text"},
        {"prompt": [1, -1]},
        {"prompt": [1, 2**40]},
        {"prompt": [1, True]},
        {"first_token": None},
        {"first_logprob": "0"},
        {"surplus": 1},
        {"num_generated": 1},
        {"num_generated": -1},
        {"num_generated": True},
        {"num_generated": "1"},
        {"earlier_logprobs": [0.5]},
        {"earlier_logprobs": [None], "num_generated": 0},
        {"prompt": [1, 2], "num_generated": 1, "earlier_logprobs": "0"},
        {"prompt": [1, 2], "num_generated": 1, "earlier_logprobs": [None]},
    ],
)
def test_a_malformed_handoff_is_refused(change: dict[str, Any]) -> None:
    fields = {"ticket": "", "prompt": [1], "first_token": 2, "first_logprob": None, **change}
    with pytest.raises(ConfigError, match=r"malformed|token ids|not a ticket"):
        Handoff.from_json(json.dumps(fields)).open_ticket()


@pytest.mark.parametrize(
    "fields",
    [
        {"ticket": "KVT1"},
        {"ticket": 5, "tokens": []},
        {"ticket": "", "tokens": [-1]},
        {"ticket": "", "tokens": {}},
        {"ticket": "", "tokens": [True]},
        {"ticket": "", "tokens": [1], "prompt": []},
        [],
    ],
)
def test_a_malformed_prefix_is_refused(fields: Any) -> None:
    with pytest.raises(ConfigError, match=r"malformed|token ids|not a ticket"):
        Prefix.from_json(json.dumps(fields)).open_ticket()


def test_a_message_is_what_it_was_made_for() -> None:
    """A ticket of one kind, or for other tokens, opens no other message. Nor does one whose counts were changed."""
    marks = {
        fingerprint((1, 2), 3),
        fingerprint((1, 2), 3, 1),
        fingerprint((1, 2, 3), 1),
        fingerprint((1,), 2),
        prefix_mark((1, 2, 3)),
        prefix_mark((1, 2)),
    }
    assert len(marks) == 6


def test_messages_survive_json_and_only_moved_ones_have_new_fields() -> None:
    plain = Handoff("t", (1, 2), 3, -0.5)
    moved = Handoff("t", (1, 2), 3, -0.5, 1, (-0.25,))
    assert [Handoff.from_json(each.to_json()) for each in (plain, moved)] == [plain, moved]
    assert set(json.loads(plain.to_json())) == {"ticket", "prompt", "first_token", "first_logprob"}
    assert Prefix.from_json(Prefix("t", (1, 2)).to_json()) == Prefix("t", (1, 2))


@given(st.dictionaries(st.sampled_from(_FIELDS), _VALUES) | _VALUES)
def test_any_json_is_parsed_or_refused(value: Any) -> None:
    for kind in (Handoff, Prefix):
        with suppress(ConfigError):
            kind.from_json(json.dumps(value))
