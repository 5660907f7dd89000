# SPDX-License-Identifier: Apache-2.0
"""Skips the module that imports it, unless torch and a transformers that kvlink serves are installed."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="pip install 'kvlink[demo]'")
pytest.importorskip("transformers", reason="pip install 'kvlink[demo]'")
_allocators = pytest.importorskip(
    "transformers.generation.continuous_batching.cache_allocators", reason="transformers is older than 5.19"
)
if not hasattr(_allocators.FullAttentionCacheAllocator, "layer_type"):
    pytest.skip("transformers is older than 5.19", allow_module_level=True)
