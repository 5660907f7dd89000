# SPDX-License-Identifier: Apache-2.0
"""Dynamo's registry of connectors, as it is there and as it may be: absent, without NIXL, or with ours already."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from kvlink.integrations.vllm.registration import make_known

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
