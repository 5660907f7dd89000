# SPDX-License-Identifier: Apache-2.0
"""Computes the pieces that bare calls move, without the planner."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvlink import KVLayout

from .contents import Ids

Pieces = npt.NDArray[np.uint64]
"""Rows of from address, to address and bytes."""


class End(NamedTuple):
    """A rank's layout, the layers to move, the request's blocks there, and the address of its pool."""

    layout: KVLayout
    layers: tuple[int, int]
    ids: Ids
    base: int

    def addresses(self, token: npt.NDArray[np.int64], head: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the addresses of rows, plane by plane."""
        block, within = np.divmod(token, self.layout.block_tokens)
        row = self.ids[block].astype(np.int64) * self.layout.block_stride + within * self.layout.token_stride
        row += (head - self.layout.first_head) * self.layout.head_stride
        planes = np.array([plane.offset for plane in self.layout.planes_of(self.layers)])
        found: npt.NDArray[np.int64] = (self.base + planes[:, np.newaxis] + row).ravel()
        return found


def pieces_of(owner: End, reader: End, heads: tuple[int, int], tokens: int) -> Pieces:
    """Returns the pieces of `heads` of the model, for a request's first `tokens`. Pieces contiguous at both ends are
    merged.

    Requires equal block sizes and orders of axes.
    """
    layout, num_heads = reader.layout, heads[1] - heads[0]
    token = np.arange(tokens)
    if layout.head_stride > layout.token_stride:  # a head's tokens are contiguous
        firsts = token[:: layout.block_tokens]
        sizes = np.repeat(np.minimum(layout.block_tokens, tokens - firsts) * layout.row_bytes, num_heads)
        token, head = np.repeat(firsts, num_heads), np.tile(np.arange(*heads), len(firsts))
    else:  # a token's heads are contiguous
        head, sizes = np.full(tokens, heads[0]), np.full(tokens, num_heads * layout.row_bytes)
    sizes = np.tile(sizes, len(layout.planes_of(reader.layers)))
    starts, ends = owner.addresses(token, head), reader.addresses(token, head)
    apart = (np.diff(starts) != sizes[:-1]) | (np.diff(ends) != sizes[:-1])
    firsts = np.flatnonzero(np.concatenate(([True], apart)))
    columns = (starts[firsts], ends[firsts], np.add.reduceat(sizes, firsts))
    return np.ascontiguousarray(np.stack(columns, axis=1).astype(np.uint64))
