# SPDX-License-Identifier: Apache-2.0
"""A guard counts what it keeps inside a request, shows the first of each kind with its trace, and shows no ticket."""

from __future__ import annotations

import logging

import pytest

from kvlink.integrations.request_guard import RequestGuard

TICKET = "S1ZUM" + "A" * 95


def test_no_ticket_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    guard = RequestGuard(logging.getLogger("guarded"))
    with guard.around("load", f"id {TICKET}"):
        raise KeyError(f"{TICKET} and more")
    with guard.around("load", "r"):
        f"{TICKET}\ud800".encode()
    assert "S1ZUM" not in caplog.text
    assert "load failed, and the others go on: KeyError: '(a ticket) and more'" in caplog.text
    assert guard.take_counts() == {"load": 2}
    assert guard.take_counts() == {}


def test_the_first_of_a_kind_has_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    guard = RequestGuard(logging.getLogger("guarded"))
    for _ in range(2):
        with guard.around("load", "r"):
            raise ValueError("no")
    first, second = (record.getMessage() for record in caplog.records)
    assert "test_request_guard.py" in first
    assert second == "request r: load failed, and the others go on: ValueError: no"


def test_what_ends_a_process_leaves() -> None:
    with pytest.raises(KeyboardInterrupt), RequestGuard(logging.getLogger("guarded")).around("load", "r"):
        raise KeyboardInterrupt
