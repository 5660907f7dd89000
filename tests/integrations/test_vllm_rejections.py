# SPDX-License-Identifier: Apache-2.0
"""Requests that decode's API server does not admit: vLLM says so, and prefill has its blocks back at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")

from test_vllm_connector import PROMPT, gone
from vllm_server import ASK_PREFILL, Server, request

from kvlink.integrations.vllm.wire.handoff import KEY


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    """No lease ends by itself."""
    with Server("p", lease_s=600) as prefill, Server("d") as decode:
        yield prefill, decode


@pytest.mark.parametrize("aborted", [True, None])
def test_a_request_that_decode_refuses_gives_the_blocks_back(
    servers: tuple[Server, Server], aborted: bool | None
) -> None:
    """vLLM's notice has a prompt of its own. Older ones do not say that it is aborted at once."""
    prefill, decode = servers
    _, params = prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1])
    notice = request("x", [0], params)
    if aborted is not None:
        notice.abort_immediately = aborted
    decode.scheduler.incoming.arrived(notice)
    assert decode.scheduler.finished(notice, ([],), False) == (False, None)
    prefill.step_until(lambda: "r" in prefill.sent)
    assert gone(prefill)
    assert decode.scheduler.take_counts() == {"released": 1}
    assert prefill.ranks[0].take_stats() is None, "nothing expired"


def test_a_prompt_of_token_0_is_no_refusal(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    _, params = prefill.prefill(request("r", [0], ASK_PREFILL), [3])
    asks = request("x", [0], params)
    asks.abort_immediately = False
    assert decode.load(asks, [5]) == (1, True)
    decode.step_until(lambda: "x" in decode.received)
    assert not decode.failed
    assert decode.scheduler.take_counts() == {}


@pytest.mark.parametrize("handed_off", [{KEY: {"ticket": "AAAA"}}, {}])
def test_a_refusal_without_a_handoff_is_no_error(
    servers: tuple[Server, Server], handed_off: dict[str, object]
) -> None:
    notice = request("x", [0], {"do_remote_prefill": True} | handed_off)
    notice.abort_immediately = True
    servers[1].scheduler.incoming.arrived(notice)
    servers[1].scheduler.finished(notice, ([],), False)
    assert servers[1].scheduler.take_counts() == ({"malformed": 1} if handed_off else {})
