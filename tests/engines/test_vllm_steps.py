# SPDX-License-Identifier: Apache-2.0
"""vLLM without servers: handoffs in parts between schedulers whose steps the test makes, and what is refused.

vLLM 0.33 has no package for CPUs. Nothing here runs one of its kernels, so its Python files run over the packages that
were installed for 0.32.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers import ENGINES, MODELS
from vllm_source import trees

PYTHON = ENGINES / "vllm" / "bin" / "python"

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (ENGINES / "vllm" / ".made").exists(), reason="no vLLM in build/engines"),
]

Runs = Callable[..., dict[str, Any]]


@pytest.fixture(params=["0.32", "0.33"])
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def said_by(release: str) -> Runs:
    """Runs a program with this vLLM, and returns the JSON object that it prints."""
    env = dict(os.environ)
    if release != "0.32":
        found = [tree.root for version, tree in trees().items() if version.startswith(release)]
        if not found:
            pytest.skip(f"no source of vLLM {release}: .ci/vllm-source")
        env |= {"PYTHONPATH": str(found[0]), "VLLM_TARGET_DEVICE": "cpu"}

    def run(*command: str) -> str:
        ran = subprocess.run(
            [str(PYTHON), *command], capture_output=True, text=True, timeout=800, check=False, env=env
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        return ran.stdout.splitlines()[-1]

    def said(script: str, *arguments: str) -> dict[str, Any]:
        output = run(str(Path(__file__).with_name(script)), str(MODELS / "llama"), *arguments)
        read: dict[str, Any] = json.loads(output)
        return read

    assert run("-c", "import vllm.version; print(vllm.version.__version__)").startswith(release)
    return said


@pytest.mark.parametrize(
    ("scenario", "announced", "loaded"),
    [
        ("full", "s", {"full.0": 202, "full.1": 202}),
        ("windows", "s", {"full.0": 202, "full.1": 202, "window.0": 42, "window.1": 42}),
        ("preempted", None, {}),
        ("aborted", "s", {}),
    ],
)
def test_between_two_chunks(
    said_by: Runs, scenario: str, announced: str | None, loaded: dict[str, int]
) -> None:
    """Part of the prompt is at decode before prefill has its third chunk; in the end nothing is left anywhere."""
    output = said_by("stepping.py", scenario)
    assert output == {"announced": announced, "loaded": loaded, "left": [[0, 0], [0, 0]]}


def test_what_cannot_be_served_is_refused_at_the_start(said_by: Runs, release: str) -> None:
    """By the name of the setting, or of the layer. vLLM 0.33 tells connectors when it sleeps."""
    output = said_by("refusing.py")
    assert (output.pop("as_it_is"), output.pop("bidirectional")) == ("", "")
    named = {
        "in_two_stages": "pipeline_parallel_size=2",
        "contexts_shared": "decode_context_parallel_size=2",
        "that_sleeps": "--enable-sleep-mode",
        "with_routed_experts": "--enable-return-routed-experts",
        "with_states_of_all_blocks": "--mamba-cache-mode all",
        "with_states_cached": "--no-enable-prefix-caching",
        "with_states_and_drafts": "--speculative-config",
        "with_scales_of_tokens": "--kv-cache-dtype int8_per_token_head",
        "with_mla_and_drafts": "--speculative-config with vLLM's backend CPU_MLA",
        "with_numbered_images": "--mm-processor-cache-gb 0",
        "with_a_buffer": '"kv_buffer_device": "cuda"',
        "with_a_host_pool": "HiSparse",
        "with_a_replay": "--no-swa-bounded-replay",
        "bidirectional_without_prefix_caching": "--no-enable-prefix-caching",
        "bidirectional_producer": "kv_role",
        "bidirectional_that_fails": "kv_load_failure_policy",
        "bidirectional_with_windows": "SlidingWindowSpec",
        "bidirectional_with_states": "MambaSpec",
    }
    if release != "0.32":
        assert output.pop("that_sleeps") == ""
        del named["that_sleeps"]
    assert {what for what, name in named.items() if name in output[what]} == set(output)


def test_caches_that_vllm_makes_for_deepseek_v4_are_handed_off(said_by: Runs) -> None:
    """By vLLM's specs, groups, packed memory and views: every byte that decode reads, with rows and without."""
    output = said_by("compressed_caches.py")
    assert (output["by_rows"], output["by_blocks"], output["refused"]) == ([], [], [])
    assert output["block_tokens"] == [64, 64, 64, 256, 4, 8]
    assert output["units"] == [[64], [64], [64], [256, 256, 256], [1, 1], [1]]
    assert output["ring"] == 8 * 128 * 4
    served = {kind for kind, refusal in output["kinds"].items() if not refusal}
    assert served == {
        "FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec",
        "ChunkedLocalAttentionSpec", "CircularBufferSpec",
    }  # fmt: skip
    assert all(kind in refusal for kind, refusal in output["kinds"].items() if refusal)


def test_chats_in_pools_that_evict_all_the_time(said_by: Runs) -> None:
    """Whatever a step reads is right, and nothing is left in use."""
    output = said_by("chatting.py")
    assert output["left"] == [[0, 0], [0, 0]]
    assert all(output["turns"][result] >= 5 for result in ("loaded", "evicted")), output


def test_nothing_from_outside_ends_the_engine(said_by: Runs) -> None:
    """A thousand examples of hostile ids and handoffs, in any order of events: right tokens, and nothing is left."""
    output = said_by("hostile.py", "1000")
    assert output["guarded"] == {}
    assert output["transports"]["loopback"] > 300
    assert {"malformed", "another_layout", "another_prompt"} <= output["unused"].keys()
