# SPDX-License-Identifier: Apache-2.0
"""KVLinkConnector under vLLM's MultiConnector: beside one that stores, and refused beside another that hands off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from connectors import PATIENT_LEASE_S, kv_transfer
from pair import Pair, eventually, flags, prompt
from references import References, references_for
from servers import ENGINES, START_S, Server, ServerFailed, running, vllm

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (ENGINES / "vllm" / ".made").exists(), reason="no vLLM in build/engines"),
]

MODEL = "llama"
LENGTHS = (1, 127, 300, 1300)
SETTLE_S = 30.0


def beside(*parts: dict[str, Any]) -> dict[str, Any]:
    """The value of --kv-transfer-config for connectors side by side."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"connectors": list(parts)},
    }


def part(connector: str, **more: Any) -> dict[str, Any]:
    one = kv_transfer(connector, lease_s=PATIENT_LEASE_S)
    del one["kv_load_failure_policy"]
    return one | more


def storing(folder: Path) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders of either server. Neither sees the other's."""
    return [tmp_path_factory.mktemp(role) for role in ("prefill", "decode")]


@pytest.fixture(scope="module")
def both(folders: list[Path]) -> Iterator[Pair]:
    """Two servers. Decode finds KVLinkConnector by its module's path, and loads no plug-in."""
    ours = [
        part("KVLinkConnector"),
        part("KVLinkConnector", kv_connector_module_path="kvlink.integrations.vllm"),
    ]
    launches = [
        vllm(f"{role}-multi", MODEL, beside(one, storing(folder)), flags(MODEL), env)
        for role, one, folder, env in zip(
            ("prefill", "decode"), ours, folders, ({}, {"VLLM_PLUGINS": "none"}), strict=True
        )
    ]
    with running(launches) as (prefill, decode):
        yield Pair(MODEL, "KVLinkConnector", prefill, decode, PATIENT_LEASE_S, [])


@pytest.fixture(scope="module")
def expected() -> Iterator[References]:
    references = references_for(MODEL)
    references.learn(prompt("beside another", num_tokens) for num_tokens in LENGTHS)
    yield references
    references.close()


def test_beside_one_that_stores(both: Pair, expected: References, folders: list[Path]) -> None:
    """Prefill's own connector stores each prompt, and loads it in the second turn. The handoff is kvlink's in both."""
    for turn in range(2):
        both.forget()
        loads = both.loads()
        for num_tokens in LENGTHS:
            tokens = prompt("beside another", num_tokens)
            answer = both.continued(tokens, both.hand_off(tokens))
            assert (answer.status, answer.tokens) == (200, expected(tokens)), (turn, num_tokens)
        assert eventually(lambda before=loads: both.loads() == before + len(LENGTHS), SETTLE_S)
        assert (both.prefill.num_logged("Inject KV cache of") > 0) is (turn == 1)
    assert both.decode.metric("vllm:kvlink_failed_loads_total") == 0
    assert all(any(folder.rglob("*.safetensors")) for folder in folders)
    assert both.settles(SETTLE_S)


def test_another_that_hands_off_is_refused_at_the_start() -> None:
    """In either order, before vLLM passes one's handshake to the other."""
    parts = [part("KVLinkConnector"), part("NixlConnector")]
    launches = [vllm("refused-multi", MODEL, beside(*order), flags(MODEL)) for order in (parts, parts[::-1])]
    servers = [Server(launch) for launch in launches]
    try:
        for server in servers:
            with pytest.raises(ServerFailed):
                server.wait(START_S)
            assert server.num_logged("both hand requests off") > 0, server.tail(200)
    finally:
        for server in servers:
            server.close()
