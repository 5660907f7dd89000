# SPDX-License-Identifier: Apache-2.0
"""Tiny models with seeded random weights, made here and downloaded from nowhere: `python models.py FOLDER`.

Runs in an engine's environment, once: a folder that this very file made is left as it is. Greedy tokens of each
model are checked to change with its KV cache; only so do equal tokens prove that the right bytes arrived.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DynamicCache,
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3NextConfig,
)

VOCABULARY = 512
MAX_TOKENS = 8192
_SEED = 2026
_STAMP = "made-by"
_CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"

# With the usual 0.02 a random model repeats its last token and ignores its cache.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "max_position_embeddings": MAX_TOKENS,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "float32",
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_COMMON, num_hidden_layers=8, num_key_value_heads=4, head_dim=64),
    "qwen3": Qwen3Config(**_COMMON, num_hidden_layers=6, num_key_value_heads=4, head_dim=128),
    # Five layers with a window to one without, as in the real one: several cache groups.
    "gemma3": Gemma3TextConfig(
        **_COMMON | {"initializer_range": 0.05},  # its embeddings are scaled by 16: more would drown the rest
        num_hidden_layers=12,
        num_key_value_heads=4,
        head_dim=64,
        sliding_window=512,
        query_pre_attn_scalar=64,
    ),
    # vLLM's MLA kernel for CPUs knows this latent size alone: 512 + 64. All layers dense, no experts.
    "deepseek": DeepseekV2Config(
        **_COMMON,
        num_hidden_layers=4,
        num_key_value_heads=8,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=4,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
    ),
    # Three layers of Mamba-2 to one of attention, all dense.
    "granite-hybrid": GraniteMoeHybridConfig(
        **_COMMON | {"initializer_range": 0.1},
        num_hidden_layers=4,
        num_key_value_heads=4,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=512,
        mamba_n_heads=16,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_d_head=32,
        mamba_d_conv=4,
        mamba_expand=2,
        position_embedding_type="rope",
    ),
    # Three layers of a gated delta net to one of attention. vLLM's kernel for CPUs takes heads of 128 in bfloat16 only.
    "qwen3-next": Qwen3NextConfig(
        **_COMMON | {"initializer_range": 0.1, "dtype": "bfloat16"},
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        full_attention_interval=4,
    ),
}
HYBRIDS = ("granite-hybrid", "qwen3-next")
"""Models whose layers keep states, which the check of the cache below does not know."""


def make(name: str, folder: Path) -> None:
    """Writes weights, configuration and tokenizer of one model to `folder`, complete or not at all."""
    torch.manual_seed(_SEED)
    network: Any = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager")
    network.to(getattr(torch, str(CONFIGS[name].dtype).removeprefix("torch.")))
    network.train(False)
    if name not in HYBRIDS:
        check_tokens_depend_on_the_cache(name, network)
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    network.save_pretrained(unfinished)
    tokenizer().save_pretrained(unfinished)
    (unfinished / _STAMP).write_text(_this_file())
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def tokenizer() -> PreTrainedTokenizerFast:
    """A word a token: "t0 t1 … t511". Text and token ids turn into each other without loss."""
    words = {f"t{token}": token for token in range(VOCABULARY)}
    split = Tokenizer(models.WordLevel(words, unk_token="t0"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=split, unk_token="t0", chat_template=_CHAT)


@torch.inference_mode()
def check_tokens_depend_on_the_cache(
    name: str, network: Any, num_tokens: int = 300, num_new: int = 24
) -> None:
    """Raises SystemExit when the output repeats itself, or stays the same with any eighth of the cache negated."""
    torch.set_num_threads(1)
    prompt = torch.randint(VOCABULARY, (1, num_tokens), generator=torch.Generator().manual_seed(_SEED))

    def continued(spoilt: slice) -> list[int]:
        cache = DynamicCache(config=network.config)
        tokens = [int(network(prompt, past_key_values=cache).logits[0, -1].argmax())]
        for layer in cache.layers:
            layer.keys[:, :, spoilt].neg_()
            layer.values[:, :, spoilt].neg_()
        while len(tokens) < num_new:
            logits = network(torch.tensor([tokens[-1:]]), past_key_values=cache).logits
            tokens.append(int(logits[0, -1].argmax()))
        return tokens

    expected = continued(slice(0, 0))
    if len(set(expected)) <= num_new // 2:
        raise SystemExit(f"{name} repeats itself, so equal tokens prove nothing: {expected}")
    eighth = num_tokens // 8
    for start in range(0, num_tokens - eighth, eighth):
        if continued(slice(start, start + eighth)) == expected:
            raise SystemExit(f"{name} ignores tokens {start}-{start + eighth} of its cache: {expected}")


def _this_file() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def main(folder: Path) -> None:
    """Makes what is not there yet."""
    for name in CONFIGS:
        stamp = folder / name / _STAMP
        if not stamp.exists() or stamp.read_text() != _this_file():
            make(name, folder / name)
            layers = json.loads((folder / name / "config.json").read_text())["num_hidden_layers"]
            print(f"made {folder / name}: {layers} layers")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
