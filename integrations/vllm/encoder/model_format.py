# SPDX-License-Identifier: Apache-2.0
"""Describes what two servers must agree on before one uses the other's encoder outputs: model, processor, dtype."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

from vllm.multimodal import MULTIMODAL_REGISTRY

from kvlink.errors import ConfigError
from kvlink.layout.model_identity import model_id

from ..model.engine_config import model_of
from ..model.prompt_inputs import check_media
from .items import ItemFormat

_log = logging.getLogger("vllm.kvlink")

_VERSION = 2
_OF_A_PLACE = ("name_or_path", "transformers_version", "auto_map")
_PROCESSORS = ("image_processor", "video_processor", "feature_extractor")


def format_of(vllm_config: Any, same: str) -> ItemFormat:
    """Returns the format of this server's encoder outputs. `same` is the setting KVLINK_SAME_MODEL."""
    model = vllm_config.model_config
    identity = model_of(vllm_config, same)
    media = model.multimodal_config
    described = {
        "version": _VERSION,
        "model": model_id(identity),
        "settings": _settings_of(model.hf_config),
        "processor": _processor(model),
        "processor_options": (media.mm_processor_kwargs or {}) if media is not None else {},
    }
    text = json.dumps(described, sort_keys=True, default=str)
    dtype = model.dtype
    return ItemFormat(
        hashlib.sha256(text.encode()).hexdigest(),
        str(dtype).removeprefix("torch."),
        dtype.itemsize,
        int(model.get_inputs_embeds_size()),
        identity,
    )


def check_supported(vllm_config: Any) -> None:
    """Raises ConfigError for the first part of the configuration that the encoder connector does not serve."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"KVLinkEncoderConnector does not support {name} {getattr(parallel, name)}")
    if model.is_encoder_decoder:
        raise ConfigError("KVLinkEncoderConnector does not support encoder-decoder models")
    check_media(vllm_config)


def _processor(model: Any) -> dict[str, Any]:
    """Returns the settings of the processors that make the encoder's input, which decide on its output too."""
    processor: Any = MULTIMODAL_REGISTRY.create_processor(model).info.get_hf_processor()
    parts = {name: getattr(processor, name, None) for name in _PROCESSORS}
    return {name: _settings_of(part) for name, part in parts.items() if part is not None}


def _settings_of(described: Any) -> Any:
    """Returns the dictionary of a configuration without what depends on its place or on the version of a library."""
    return _kept(described.to_dict())


def _kept(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            str(name): _kept(each)
            for name, each in value.items()
            if not str(name).startswith("_") and name not in _OF_A_PLACE
        }
    return [_kept(each) for each in value] if isinstance(value, (list, tuple)) else value
