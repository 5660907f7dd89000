# SPDX-License-Identifier: Apache-2.0
"""KV geometries, of the table and of config.json files as model cards have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlink.benchmarks.workloads.models import MODELS, Model, model_of
from kvlink.errors import ConfigError

QWEN3_8B = {
    "model_type": "qwen3", "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_8B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
DEEPSEEK = {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "torch_dtype": "float32"}


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        (QWEN3_8B, MODELS["qwen3-8b"].token_bytes),
        (LLAMA_8B, MODELS["llama-3.1-8b"].token_bytes),
        (DEEPSEEK, MODELS["deepseek-v3"].token_bytes),
        ({"text_config": LLAMA_8B, "model_type": "vision"}, 128 << 10),
        (GPT2, 12 * 2 * 768 * 4),
        ({**LLAMA_8B, "layer_types": ["full_attention", "linear_attention"] * 16}, 64 << 10),
    ],
)
def test_configs_give_the_bytes_of_the_model_cards(config: dict[str, Any], token_bytes: int) -> None:
    assert Model.from_config(config).token_bytes == token_bytes


def test_a_path_names_a_model_too(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN3_8B))
    model = model_of(str(file))
    assert (model.name, model.token_bytes) == ("qwen3", 144 << 10)
    assert model.geometry(8, 1).total_heads == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a readable"), ("[1]", "a JSON object"), ("[" * 5000, "a readable"), ("{}", "num_hidden_layers"),
        ('{"num_hidden_layers": -1}', "not a number"), ('{"num_hidden_layers": true}', "not a number"),
        ('{"num_hidden_layers": 1e3}', "not a number"), ('{"text_config": 3}', "no language model"),
        ('{"num_hidden_layers": 2, "layer_types": ["mamba", "mamba"]}', "no layer"),
        ('{"num_hidden_layers": 2, "num_attention_heads": 4}', "hidden_size"),
    ],
)  # fmt: skip
def test_other_files_are_refused(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        model_of(str(file))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4), lambda inner: st.lists(inner, max_size=3)
)


@given(st.dictionaries(st.sampled_from([*QWEN3_8B, *DEEPSEEK, "text_config", "layer_types"]), JSON))
def test_any_config_is_a_model_or_an_error(config: dict[str, Any]) -> None:
    try:
        model = Model.from_config(config)
    except ConfigError:
        return
    assert model.token_bytes > 0


@pytest.mark.parametrize(("tp", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_ranks_share_heads_and_never_have_none(tp: int, heads: int) -> None:
    assert MODELS["qwen2.5-7b"].geometry(tp, 1).total_heads == heads


def test_heads_that_do_not_divide_are_refused() -> None:
    for tp in (3, 6):
        with pytest.raises(ConfigError, match="do not divide"):
            MODELS["qwen2.5-7b"].geometry(tp, 1)
