# SPDX-License-Identifier: Apache-2.0
"""Defines the contents of blocks: each word says by whom, for which request and for which place it was written."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from kvlink import BlockPool
from kvlink.layout import Geometry, KVLayout, dense

Words = npt.NDArray[np.uint64]

BLOCK_TOKENS = 16
_ROW_BYTES = 512
BLOCK_WORDS = BLOCK_TOKENS * _ROW_BYTES // 8

POISON = np.uint64(0x5EED_DEAD_5EED_DEAD)
"""In destinations before and after a pull. No owner writes it: its lowest bit is not what words have."""
_SCRAMBLE = np.uint64(0x9E37_79B9_7F4A_7C15)  # odd, so that it can be undone
_UNSCRAMBLE = np.uint64(pow(int(_SCRAMBLE), -1, 1 << 64))
_OWNER, _REQUEST, _BLOCK, _PLACE = np.uint64(54), np.uint64(30), np.uint64(18), np.uint64(0)
MAX_OWNERS, MAX_REQUESTS = 1 << 10, 1 << 24

NOBODY = 0
"""The request that blocks hold which belong to none."""


def layout(num_blocks: int) -> KVLayout:
    """Blocks that are contiguous."""
    geometry = Geometry(
        num_layers=1,
        total_heads=1,
        row_bytes=_ROW_BYTES,
        num_blocks=num_blocks,
        block_tokens=BLOCK_TOKENS,
        planes_per_layer=1,
    )
    return dense(geometry)


def words_of(pool: BlockPool) -> Words:
    """A row a block."""
    return pool.numpy().view(np.uint64).reshape(-1, BLOCK_WORDS)


def written(owner: int, request: int, first: int, num_blocks: int) -> Words:
    """Returns what `owner` writes for blocks `first`… of a request, a row a block."""
    places = np.arange(BLOCK_WORDS, dtype=np.uint64)
    blocks = np.arange(first, first + num_blocks, dtype=np.uint64)[:, None] << _BLOCK
    whose = np.uint64(owner) << _OWNER | np.uint64(request) << _REQUEST
    return (whose | blocks | places) * _SCRAMBLE


def differences(seen: Words, owner: int, request: int, first: int) -> Counter[str]:
    """Words of a valid pull that are not what `owner` wrote for it: "foreign" ones are of another request, "wrong" ones
    of another place, of nobody, or of none that was ever written."""
    differ = seen != written(owner, request, first, len(seen))
    found: Counter[str] = Counter()
    if differ.any():
        found["foreign"] = sum(of_others(seen[differ], owner, request).values())
        found["wrong"] = int(differ.sum()) - found["foreign"]
    return found


def of_others(seen: Words, owner: int, request: int) -> Counter[tuple[int, int]]:
    """How many words were written for which other request, by owner and request. A lone word is half of what was there
    before and half of what came: nobody's."""
    theirs = seen * _UNSCRAMBLE
    whose = theirs >> _REQUEST
    is_written = (theirs & np.uint64((1 << 18) - 1)) < np.uint64(BLOCK_WORDS)
    is_somebodys = whose & np.uint64(MAX_REQUESTS - 1) != np.uint64(NOBODY)
    is_theirs = is_written & is_somebodys & (whose != np.uint64(owner << 24 | request))
    found, numbers = np.unique(whose[is_theirs], return_counts=True)
    rows = zip(found.tolist(), numbers.tolist(), strict=True)
    return Counter({(who >> 24, who % MAX_REQUESTS): number for who, number in rows if number > 1})
