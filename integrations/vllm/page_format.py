# SPDX-License-Identifier: Apache-2.0
"""Says how the bytes of attention's pages are to be read where dtype and shape do not: two servers must agree on it.

To torch, all quantized caches are bytes. On CPUs, a page's order follows the instructions of vLLM's kernels.
"""

from __future__ import annotations

from collections.abc import Iterable


def page_format(cache_dtype: str, fp8: str, kernels: Iterable[str]) -> list[str]:
    """Returns words for a comparison: none if dtype and shape say all.

    `cache_dtype` is vLLM's setting. `fp8` is the type behind its "fp8" on this device, empty if the cache is not
    quantized. `kernels` are the kinds of instructions that the kernels for CPUs use.
    """
    words = []
    if fp8:
        words.append("cache=" + (fp8 if cache_dtype in ("fp8", "fp8_e4m3") else cache_dtype))
    if kinds := "+".join(sorted(set(kernels))):
        words.append("pages=" + kinds)
    return words
