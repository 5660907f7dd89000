# SPDX-License-Identifier: Apache-2.0
"""Models of llama's shape that are another model, or the same one in another place: `other_models.py MODELS`.

Runs in an engine's environment, beside what models.py has made there.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]
_LAYER = "model.layers.5.mlp.down_proj.weight"


def _fine_tuned(weights: Weights, config: dict[str, Any]) -> None:
    weights[_LAYER] *= 1.5


def _another_base(weights: Weights, config: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        if tensor.dim() == 2:
            weights[name] = torch.randn(tensor.shape, generator=generator) * 0.2


def _another_revision(weights: Weights, config: dict[str, Any]) -> None:
    weights["model.layers.0.input_layernorm.weight"][7] = 1.25


def _rope_theta(weights: Weights, config: dict[str, Any]) -> None:
    config["rope_parameters"] = {**config["rope_parameters"], "rope_theta": 500000.0}


def _rope_scaling(weights: Weights, config: dict[str, Any]) -> None:
    config["rope_parameters"] = {**config["rope_parameters"], "rope_type": "linear", "factor": 4.0}


def _norm(weights: Weights, config: dict[str, Any]) -> None:
    config["rms_norm_eps"] = 0.1


def _same(weights: Weights, config: dict[str, Any]) -> None:
    config["transformers_version"] = "4.0.0"


VARIANTS: Mapping[str, Callable[[Weights, dict[str, Any]], None]] = {
    "llama-tuned": _fine_tuned,
    "llama-base": _another_base,
    "llama-revision": _another_revision,
    "llama-theta": _rope_theta,
    "llama-scaled": _rope_scaling,
    "llama-norm": _norm,
    "llama-copy": _same,
    "llama-sharded": _same,
}


def make(name: str, source: Path, folder: Path) -> None:
    """Writes a variant."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    VARIANTS[name](weights, config)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    if name != "llama-sharded":
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return
    index: dict[str, str] = {}
    for number, half in enumerate((sorted(weights)[::2], sorted(weights)[1::2])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in half}, folder / file, {"format": "pt"})
        index |= dict.fromkeys(half, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def main(models: Path) -> None:
    """Writes all variants."""
    for name in VARIANTS:
        make(name, models / "llama", models / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
