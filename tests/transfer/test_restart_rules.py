# SPDX-License-Identifier: Apache-2.0
"""A pull that was cut names its first error when its owner cannot be connected again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvlink.errors import Cancelled, ConfigError, KVLinkError, PeerUnreachable, StaleBlocks, TransferTimeout
from kvlink.transfer.pull import FAILED, Pull


def cut(*, transfers: int) -> Pull:
    """A pull of two parts of which the second one was cut, if there were transfers."""
    transfer = SimpleNamespace(failure=lambda: ("PeerUnreachable", "cut off", "", 0))
    core = SimpleNamespace(
        state=FAILED,
        done=lambda: True,
        wait=lambda _: True,
        failure=lambda: ("PeerUnreachable", "refused", "", 0),
        cut=lambda part: transfer if part == 1 else None,
    )
    peer = SimpleNamespace(transport="made up")
    owners = [(SimpleNamespace(worker_id=name, request_id="request"), peer) for name in ("kept", "lost")]
    pull = Pull(cast(Any, core), "request", cast(Any, owners))
    if transfers:
        pull._note_cuts([1])
    return pull


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError, PeerUnreachable),
        (StaleBlocks, StaleBlocks),
        (TransferTimeout, TransferTimeout),
        (Cancelled, Cancelled),
    ],
)
def test_what_it_fails_with(error: type[KVLinkError], kind: type[KVLinkError]) -> None:
    first = cut(transfers=0)
    first._error = error("no")
    with pytest.raises(error, match="no"):
        first.wait()
    again = cut(transfers=2)
    again._error = error("no")
    with pytest.raises(kind) as raised:
        again.wait()
    named = kind in (PeerUnreachable, TransferTimeout)
    assert str(raised.value).startswith("request request from lost over made up: cut off") == named
