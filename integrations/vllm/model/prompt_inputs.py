# SPDX-License-Identifier: Apache-2.0
"""Names what a request's cache is computed from besides token ids: images and other media, and a LoRA adapter.

A handoff's digest has these names, so that they must be the same at both servers and differ if the cache does.
"""

from __future__ import annotations

import json
from typing import Any

from kvlink.errors import ConfigError

from ...models import Adapters

_adapters = Adapters()


def features_of(request: Any, num_tokens: int) -> list[str]:
    """Returns the names for the first `num_tokens` tokens of one of vLLM's requests.

    A medium has vLLM's hash of its content, and its place. An adapter has that of its files, not its name.
    """
    names = [
        json.dumps([feature.modality, place.offset, place.length, str(feature.identifier)])
        for feature in request.mm_features or ()
        if (place := feature.mm_position).offset < num_tokens
    ]
    adapter = request.lora_request
    if adapter is not None:
        names.append(json.dumps(["lora", _adapters.text(adapter.lora_int_id, str(adapter.lora_path or ""))]))
    return names


def has_embeddings(request: Any) -> bool:
    """Returns whether the client sent embeddings in place of some or all token ids, which no digest binds."""
    return request.prompt_token_ids is None or request.prompt_embeds is not None


def check_media(vllm_config: Any) -> None:
    """Raises ConfigError if vLLM names images by their order of arrival, which a handoff's digest must tell apart."""
    media = vllm_config.model_config.multimodal_config
    if media is None or media.mm_processor_cache_gb > 0 or vllm_config.cache_config.enable_prefix_caching:
        return
    raise ConfigError(
        "kvlink tells images apart by vLLM's hashes of their content, which --mm-processor-cache-gb 0 without "
        "prefix caching turns off; give the processor's cache some memory, for example --mm-processor-cache-gb 0.1"
    )


def is_rejection(request: Any) -> bool:
    """Returns whether this is vLLM's notice of a request that it did not admit.

    Such a notice is a request with the prompt [0] that is aborted as soon as it was added. Its kv_transfer_params are
    those of the request.
    """
    return bool(getattr(request, "abort_immediately", False))
