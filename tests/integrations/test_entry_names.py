# SPDX-License-Identifier: Apache-2.0
"""Engines find kvlink by name. Their own packages are needed only once they do."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest

from kvlink.config import WorkerConfig
from kvlink.integrations.sglang import caches
from kvlink.integrations.sglang.caches import Buffers, Rank, open_caches

NAMES = [
    ("kvlink.integrations.vllm", "connector", ["KVLinkConnector"]),
    ("kvlink.integrations.vllm", "encoder.connector", ["KVLinkEncoderConnector"]),
    ("kvlink.integrations.lmcache", "channel", ["KVLinkTransferChannelContext"]),
    ("kvlink.integrations.sglang", "backend", ["KVLinkManager", "KVLinkReceiver", "KVLinkSender"]),
]


@pytest.mark.parametrize(("package", "module", "names"), NAMES)
def test_a_package_has_its_engines_classes(
    monkeypatch: pytest.MonkeyPatch, package: str, module: str, names: list[str]
) -> None:
    """As vLLM does with kv_connector_module_path: it imports the module and asks for the class."""
    made = ModuleType(f"{package}.{module}")
    vars(made).update({name: type(name, (), {}) for name in names})
    monkeypatch.setitem(sys.modules, made.__name__, made)
    found = importlib.import_module(package)
    monkeypatch.setattr(found, module, made, raising=False)
    assert set(names) < set(found.__all__)
    for name in names:
        assert getattr(found, name) is getattr(made, name)


@pytest.mark.parametrize("package", [package for package, _, _ in NAMES])
def test_other_names_are_not_there(package: str) -> None:
    with pytest.raises(AttributeError, match="KVLinkConector"):
        _ = importlib.import_module(package).KVLinkConector


def test_ports_count_up_over_ranks_and_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one setting serves a server of several ranks with several caches each."""
    opened: list[WorkerConfig] = []

    class Worker:
        def __init__(self, pool: Any, worker_id: str, *, config: WorkerConfig) -> None:
            opened.append(config)

        def close(self) -> None:
            pass

    monkeypatch.setattr(caches, "Worker", Worker)
    config = WorkerConfig(port=7000, agent_port=8000)
    kv, state = Buffers((4096,), (6400,), 128), Buffers((8192,), (64,), 32)
    for number in range(2):
        rank = Rank(f"r{number}", "m", "uint8", 16, 4, number, 2, number=number)
        open_caches([kv], [("mamba", [state])], rank, config)
    assert [(one.port, one.agent_port, one.metrics_port) for one in opened] == [
        (7000 + place, 8000 + place, 0) for place in range(4)
    ]
