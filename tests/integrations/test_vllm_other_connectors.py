# SPDX-License-Identifier: Apache-2.0
"""Beside other connectors under vLLM's MultiConnector: which are refused, and what their handshakes leave out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm_server import ASK_PREFILL, Server, request

from kvlink.errors import ConfigError
from kvlink.integrations.vllm.model.other_connectors import check_others

PROMPT = list(range(10))


def _named(name: str) -> Any:
    return type(name, (), {})()


def _under(*connectors: Any) -> Any:
    return SimpleNamespace(sub_connectors=list(connectors))


@pytest.mark.parametrize(
    "other",
    ["NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector", "KVLinkConnector"],
)
@pytest.mark.parametrize("nested", [False, True])
def test_another_that_hands_off_is_refused_by_name(other: str, nested: bool) -> None:
    """vLLM would otherwise end while it starts, or at the first handoff that both answer."""
    own = _named("KVLinkConnector")
    top = _under(own, _under(_named(other)) if nested else _named(other))
    with pytest.raises(
        ConfigError, match=rf"KVLinkConnector and {other}, and both hand requests off: .* Keep one"
    ):
        check_others(own, top)


@pytest.mark.parametrize("other", ["ExampleConnector", "OffloadingConnector", "MooncakeStoreConnector"])
def test_those_that_store_are_served(other: str) -> None:
    own = _named("KVLinkConnector")
    check_others(own, _under(_named(other), own))
    check_others(own, own)


def test_nothing_is_handed_off_before_the_workers_are_known(caplog: pytest.LogCaptureFixture) -> None:
    """As long as MultiConnector has passed another's handshake only, and no step has ended."""
    with Server("p") as prefill:
        ranks = prefill.scheduler._ranks
        prefill.scheduler.set_ranks(())
        assert prefill.prefill(request("r", PROMPT, ASK_PREFILL), [3, 9, 1]) == (False, None)
        assert prefill.scheduler.take_counts() == {"no_workers": 1}
        assert "request r is not handed off: the workers have not reported yet" in caplog.text
        prefill.scheduler.set_ranks(ranks)
        assert prefill.prefill(request("s", PROMPT, ASK_PREFILL), [4, 8, 2])[0]
