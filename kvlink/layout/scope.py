# SPDX-License-Identifier: Apache-2.0
"""Tells which caches may exchange blocks, in a few bytes that a directory can compare."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvlink.errors import ConfigError
from kvlink.layout.kv_layout import KVLayout
from kvlink.layout.model_identity import PoolModel, model_id

_BYTES = 16


def cache_scope(groups: Sequence[KVLayout], model: PoolModel | None = None) -> bytes:
    """Returns 16 bytes that are equal for the caches of one model, as `KVLayout.difference` compares them.

    model: that of the pool, which an engine may have changed since it made the layouts.

    Ranks of a server have the same scope, and so have servers with other block sizes or other numbers of ranks. Raises
    ConfigError if the layout names no model, because caches of two models can have the same shape.
    """
    number = model.number if model is not None else model_id(groups[0].model)
    digest = hashlib.sha256(b"kvlink scope 1")
    for layout in groups:
        if not layout.model:
            raise ConfigError(
                "the pool's layout names no model, so its prefixes cannot be told from those of another model; set "
                "model= in the layout to a text that names model and weights"
            )
        for field in (
            f"{number:016x}" if number else layout.model,
            layout.dtype,
            layout.row_bytes,
            layout.total_heads,
            layout.total_layers,
            layout.is_state,
        ):
            text = str(field).encode()
            digest.update(len(text).to_bytes(4, "little") + text)
    return digest.digest()[:_BYTES]
