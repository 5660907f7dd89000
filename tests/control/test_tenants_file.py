# SPDX-License-Identifier: Apache-2.0
"""The tenants file is refused with the rule that is wrong, and the first rule that fits decides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlink.control.refusal import Refused
from kvlink.control.security import COORDINATOR, EVERY_TENANT, Caller, Role, TenantsFile
from kvlink.control.security.tenants import parse
from kvlink.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("{}", "must hold a JSON list of rules"),
        ("[1]", "rule 1 of f must be a JSON object whose values are strings"),
        ('[{"tenant": "a", "identity": "x"}, {"tenant": 1}]', "rule 2 of f must be"),
        (
            '[{"tenant": "a", "identity": "x", "admin": "yes"}]',
            "has unknown fields admin; known are identity, role",
        ),
        ('[{"tenant": "a"}]', "needs either identity or token_sha256"),
        ('[{"tenant": "a", "token_sha256": "s3cret"}]', "64 hexadecimal digits"),
        ('[{"tenant": "a", "identity": "x", "role": "root"}]', "role must be worker or observer, not 'root'"),
        ('[{"tenant": "A_1", "identity": "x"}]', "'A_1' is not a valid tenant: use 1 to 63 of a-z"),
        ('[{"identity": "x"}]', "'' is not a valid tenant"),
        ('[{"tenant": "*", "identity": "x"}]', r"tenant \* is for observers"),
    ],
)
def test_a_malformed_file_is_refused_with_the_rule(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(text.encode(), "f")


def test_the_first_rule_that_fits_decides(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    rules = [
        {"tenant": "a", "identity": "a.example.org", "role": "observer"},
        {"tenant": "b", "identity": "a.*"},
        {"tenant": "*", "identity": COORDINATOR, "role": "observer"},
    ]
    file.write_text(json.dumps(rules))
    gate = TenantsFile(file)
    assert gate("Status", ["x", "a.example.org"], "") == Caller("a", Role.OBSERVER)
    assert gate("Claim", ["a.example.com"], "") == Caller("b")
    assert gate("Status", [COORDINATOR], "") == Caller(EVERY_TENANT, Role.OBSERVER)
    with pytest.raises(Refused):
        gate("Status", ["a"], "")
    with pytest.raises(Refused):
        gate("Status", ["a.example.org"], "a.example.org")


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.text(),
        lambda x: (
            st.lists(x) | st.dictionaries(st.sampled_from(["tenant", "identity", "token_sha256", "role"]), x)
        ),
    ).map(lambda x: json.dumps(x).encode())
)
def test_foreign_bytes_are_refused_or_rules(text: bytes) -> None:
    try:
        rules = parse(text, "f")
    except ConfigError:
        return
    for rule in rules:
        assert bool(rule.identity) != bool(rule.token_sha256)
        assert rule.caller.tenant
