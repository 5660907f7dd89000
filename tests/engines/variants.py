# SPDX-License-Identifier: Apache-2.0
"""Makes what servers need besides the models: LoRA adapters, draft models, models with a draft layer, with images, or
with compressed caches.

`variants.py FOLDER [NAME …]` runs in vLLM's environment, once, like models.py, whose seeded random weights it uses.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from models import _COMMON, VOCABULARY, check_tokens_depend_on_the_cache, tokenizer
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV4Config,
    FalconH1Config,
    GptOssConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    NemotronHConfig,
    PretrainedConfig,
    Qwen2Config,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

_STAMP = "made-by"
_RANK = 8
_TARGETS = {"q_proj": 512, "k_proj": 256, "v_proj": 256}
"""The projections of llama that adapters change, with the sizes of their outputs."""
_HIDDEN, _LAYERS = 256, 8
_CHAT_WITH_IMAGES = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] + ' ' }}"
    "{% endfor %}{% endfor %}"
)


def adapter(seed: int) -> Callable[[Path], None]:
    """Returns what writes an adapter that changes the cache, and with it the tokens."""

    def write(folder: Path) -> None:
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for layer in range(_LAYERS):
            for target, size in _TARGETS.items():
                name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
                tensors[f"{name}.lora_A.weight"] = torch.randn(_RANK, _HIDDEN, generator=generator) * 0.2
                tensors[f"{name}.lora_B.weight"] = torch.randn(size, _RANK, generator=generator) * 0.2
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "r": _RANK,
            "lora_alpha": 2 * _RANK,
            "target_modules": list(_TARGETS),
            "bias": "none",
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))

    return write


def _llama(layers: int) -> LlamaConfig:
    return LlamaConfig(**_COMMON, num_hidden_layers=layers, num_key_value_heads=4, head_dim=64)


def draft(folder: Path) -> None:
    """A smaller model of the same vocabulary."""
    torch.manual_seed(7)
    network: Any = AutoModelForCausalLM.from_config(_llama(2), attn_implementation="eager")
    network.float().save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def eagle(folder: Path) -> None:
    """A head for llama, which reads its hidden states and has a layer, and so a cache, of its own."""
    torch.manual_seed(8)
    network: Any = AutoModelForCausalLM.from_config(_llama(1), attn_implementation="eager").float()
    tensors = {
        name.removeprefix("model."): tensor.contiguous()
        for name, tensor in network.state_dict().items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    tensors["fc.weight"] = torch.randn(_HIDDEN, 2 * _HIDDEN) * 0.05
    save_file(tensors, folder / "model.safetensors")
    _llama(1).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))


def multi_token_prediction(spoilt: bool) -> Callable[[Path], None]:
    """Returns what writes a model of MiMo's kind, whose checkpoint has a draft layer (MTP).

    Its first layer has most of the say, and the draft layer does the same to the next token. So a good part of the
    drafts is accepted, but only with the draft layer's own cache. A spoilt one fills that cache with something else.
    """

    def write(folder: Path) -> None:
        torch.manual_seed(9)
        config = Qwen2Config(**_COMMON, num_hidden_layers=4, num_key_value_heads=4)
        network: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
        network.train(False)
        with torch.no_grad():
            for layer in network.model.layers[1:]:
                layer.self_attn.o_proj.weight *= 0.1
                layer.mlp.down_proj.weight *= 0.1
        check_tokens_depend_on_the_cache(folder.name, network)
        tensors = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
        first, draft = "model.layers.0.", "model.mtp_layers.0."
        tensors |= {
            draft + name.removeprefix(first): torch.randn_like(tensor) * 0.2
            if spoilt and name.endswith(("k_proj.weight", "v_proj.weight"))
            else tensor.clone()
            for name, tensor in tensors.items()
            if name.startswith(first)
        }
        # Its input is the hidden state of a token, which it ignores, beside the next token's embedding.
        ignored, taken = torch.zeros(_HIDDEN, _HIDDEN), torch.eye(_HIDDEN) * _COMMON["initializer_range"]
        tensors[f"{draft}input_proj.weight"] = torch.cat([ignored, taken], 1)
        for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            tensors[f"{draft}{norm}.weight"] = torch.ones(_HIDDEN)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        described = json.loads((folder / "config.json").read_text())
        described |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(described))

    return write


def network_of(config: PretrainedConfig) -> Callable[[Path], None]:
    """Returns what writes a model of this configuration."""

    def write(folder: Path) -> None:
        torch.manual_seed(12)
        network: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
        network.save_pretrained(folder)
        tokenizer().save_pretrained(folder)

    return write


_ATTENTION: dict[str, Any] = {"num_hidden_layers": 4, "num_key_value_heads": 4, "initializer_range": 0.1}
_MAMBA_2: dict[str, Any] = {"mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2, "mamba_n_heads": 16}
KINDS: dict[str, PretrainedConfig] = {
    "gpt-oss": GptOssConfig(
        **_COMMON | _ATTENTION, head_dim=64, sliding_window=128, num_local_experts=4, num_experts_per_tok=2
    ),
    "llama4": Llama4TextConfig(
        **_COMMON | _ATTENTION, head_dim=64, attention_chunk_size=256, num_local_experts=4, num_experts_per_tok=1,
        interleave_moe_layer_step=2, intermediate_size_mlp=512,
    ),
    "nemotron-h": NemotronHConfig(
        **_COMMON | _ATTENTION, layers_block_type=["mamba", "attention", "mamba", "mlp"], head_dim=32,
        mamba_num_heads=16, mamba_head_dim=32, n_groups=2, ssm_state_size=16, conv_kernel=4,
    ),
    "falcon-h1": FalconH1Config(
        **_COMMON | _ATTENTION | _MAMBA_2, head_dim=32, mamba_d_ssm=512, mamba_d_head=32, mamba_n_groups=1,
    ),
    # The last five are names of older configurations, which vLLM reads.
    "lfm2": Lfm2Config(
        **_COMMON | _ATTENTION, layer_types=["conv", "full_attention", "conv", "conv"], conv_L_cache=3,
        block_auto_adjust_ff_dim=False, block_dim=_HIDDEN, block_multiple_of=_HIDDEN, block_ffn_dim_multiplier=1.0,
        conv_dim=_HIDDEN, conv_dim_out=_HIDDEN,
    ),
}  # fmt: skip
"""Attention with sinks, and in chunks; other mixtures of attention with Mamba-2; short convolutions."""


def deepseek_v4(folder: Path) -> None:
    """A layer with a window alone, two with rows of 4 tokens and an indexer, and one with rows of 128.

    transformers writes most of its weights under the names that vLLM reads.
    """
    torch.manual_seed(11)
    ratios = [0, 4, 128, 4]
    common = {name: value for name, value in _COMMON.items() if name != "intermediate_size"}
    config = DeepseekV4Config(
        **common | {"initializer_range": 0.1},
        num_hidden_layers=len(ratios),
        compress_ratios=ratios,
        num_hash_layers=1,
        q_lora_rank=128,
        o_groups=2,
        o_lora_rank=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        index_n_heads=8,
    )
    network: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            if name.endswith("tid2eid"):
                tensor.copy_(torch.rand(VOCABULARY, 4).topk(2).indices)
            elif name.endswith(("position_bias", "sinks", "e_score_correction_bias")):
                tensor.normal_(0, 0.5)
    network.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    weights = {
        re.sub(r"hc_head\.hc_", "hc_head_", name.replace(".attn.norm.", ".attn.kv_norm.")): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    del described["mlp_layer_types"]  # vLLM's configuration knows other words
    described |= {
        "compress_ratios": ratios,
        "num_hash_layers": 1,
        "qk_rope_head_dim": 64,
        "topk_method": "noaux_tc",
        "expert_dtype": "bf16",
    }
    (folder / "config.json").write_text(json.dumps(described))


class Vision(NamedTuple):
    """The encoder of a model of Idefics3's kind. An image has `pixels` x `pixels`, and becomes `tokens` tokens."""

    pixels: int
    patch: int
    factor: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    scale: float
    """The standard deviation of its weights."""

    @property
    def tokens(self) -> int:
        """Returns the number of embeddings of an image."""
        return (self.pixels // self.patch // self.factor) ** 2


def images(seen: Vision) -> Callable[[Path], None]:
    """Returns what writes a model of Idefics3's kind, whose tokens differ from image to image.

    Among vLLM's models with images it is one of the few that need no torchvision.
    """

    def write(folder: Path) -> None:
        torch.manual_seed(10)
        vision = {
            "hidden_size": seen.hidden,
            "intermediate_size": seen.intermediate,
            "num_hidden_layers": seen.layers,
            "num_attention_heads": seen.heads,
            "image_size": seen.pixels,
            "patch_size": seen.patch,
            "initializer_range": seen.scale,
        }
        words = tokenizer()
        marks = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
        words.add_special_tokens({"additional_special_tokens": marks})
        words.chat_template = _CHAT_WITH_IMAGES
        text = LlamaConfig(
            **_COMMON | {"vocab_size": VOCABULARY + 64},
            num_hidden_layers=8,
            num_key_value_heads=4,
            head_dim=64,
        )
        config = Idefics3Config(
            vision_config=vision,
            text_config=text,
            image_token_id=words.convert_tokens_to_ids("<image>"),
            scale_factor=seen.factor,
            dtype="float32",
        )
        config.initializer_range = _COMMON["initializer_range"]
        Idefics3ForConditionalGeneration(config).float().save_pretrained(folder)
        edge = {"longest_edge": seen.pixels}
        processor = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
        Idefics3Processor(processor, words, image_seq_len=seen.tokens).save_pretrained(folder)

    return write


VARIANTS: dict[str, Callable[[Path], None]] = {
    "adapter-a": adapter(1),
    "adapter-b": adapter(2),
    "llama-draft": draft,
    "llama-eagle": eagle,
    "mimo": multi_token_prediction(spoilt=False),
    "mimo-spoilt": multi_token_prediction(spoilt=True),
    "deepseek-v4": deepseek_v4,
    **{name: network_of(config) for name, config in KINDS.items()},
    "idefics3": images(Vision(112, 14, 2, 64, 128, 2, 4, 0.2)),
}
LARGER: dict[str, Callable[[Path], None]] = {
    "idefics3-12x512": images(Vision(224, 14, 2, 512, 2048, 12, 8, 0.05)),
    "idefics3-12x768": images(Vision(512, 16, 4, 768, 3072, 12, 12, 0.05)),
}
"""Models that are made only if they are named. The last one's encoder has the size of ViT-Base (86 million weights)."""


def _this_file() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def main(folder: Path, *names: str) -> None:
    """Makes what is not there yet of these, or of VARIANTS if none is named."""
    for name in names or VARIANTS:
        write = (VARIANTS | LARGER)[name]
        stamp = folder / name / _STAMP
        if stamp.exists() and stamp.read_text() == _this_file():
            continue
        unfinished = folder / f"{name}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        write(unfinished)
        (unfinished / _STAMP).write_text(_this_file())
        shutil.rmtree(folder / name, ignore_errors=True)
        unfinished.rename(folder / name)
        print(f"made {folder / name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
