# SPDX-License-Identifier: Apache-2.0
"""Computes digests of the prefixes of a request's tokens, by which two servers find what their requests have in common.

vLLM's own block hashes differ between servers, because each one starts with a random seed.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

from ..model.prompt_inputs import features_of

_DIGEST_BYTES = 16
_SHARED_TOKENS = 256
MOST_DIGESTS = 1024


def spans_of(num_blocks: int) -> tuple[int, int]:
    """Returns the number of digests for so many blocks, and the blocks from one to the next. Some may be left over."""
    blocks = -(-num_blocks // MOST_DIGESTS)
    return (num_blocks // blocks, blocks) if num_blocks else (0, 0)


def shared_span(block_tokens: int) -> int:
    """Returns the tokens from one digest to the next of prefixes that servers find by a directory.

    It is the same for servers whose blocks have different sizes, if these divide it.
    """
    return _SHARED_TOKENS if _SHARED_TOKENS % block_tokens == 0 else block_tokens


def prefix_digests(request: Any, num_tokens: int, span: int) -> list[bytes]:
    """Returns the digests of the first `span` tokens, of twice as many, and so on up to `num_tokens`.

    They depend on images, other media and the adapter as well, as far as these precede the end, and on the cache salt.
    """
    tokens = memoryview(array("q", request.all_token_ids[:num_tokens]))
    chain = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    if salt := getattr(request, "cache_salt", None):
        chain.update(b"salt\0" + str(salt).encode("utf-8", "surrogatepass") + b"\0")
    others = bool(request.mm_features or request.lora_request)
    digests = []
    for end in range(span, num_tokens + 1, span):
        chain.update(tokens[end - span : end])
        for feature in features_of(request, end) if others else ():
            chain.update(b"\0" + feature.encode())
        digests.append(chain.copy().digest())
    return digests
