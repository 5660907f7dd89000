# SPDX-License-Identifier: Apache-2.0
"""Maps LMCache's memory onto a kvlink pool: a page of `align_bytes` is a block, and an object is a run of pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvlink import BlockPool
from kvlink.errors import ConfigError
from kvlink.layout import Geometry, dense
from kvlink.ticket import MAX_BLOCKS
from kvlink.transfer.pool import Region

Object = tuple[int, int]
"""Offset and size of an object in LMCache's memory, in bytes."""

PageIds = npt.NDArray[np.uint32]

_MODEL = "LMCache L1"


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of one memory."""

    page_bytes: int
    num_bytes: int

    @property
    def num_pages(self) -> int:
        """The number of whole pages. LMCache puts no object beyond them."""
        return self.num_bytes // self.page_bytes

    def pool(self, address: int) -> BlockPool:
        """Returns the memory at `address`, which LMCache owns and must not free before the worker is closed."""
        if not address or not self.num_pages:
            raise ConfigError(
                f"LMCache's memory has {self.num_bytes} bytes at {address:#x} and no page of {self.page_bytes}; "
                "give the server memory with --l1-size-gb"
            )
        layout = dense(
            Geometry(
                num_layers=1,
                total_heads=1,
                row_bytes=self.page_bytes,
                num_blocks=self.num_pages,
                block_tokens=1,
                planes_per_layer=1,
                dtype="uint8",
                model=_MODEL,
            )
        )
        return BlockPool([Region(address, self.num_bytes, None, None)], layout)

    def check(self, each: Object) -> Object:
        """Returns the object itself. Raises ConfigError unless it begins with a page and is within the memory."""
        offset, size = each
        if (
            offset % self.page_bytes
            or offset < 0
            or size < 1
            or offset + size > self.num_pages * self.page_bytes
        ):
            raise ConfigError(
                f"an object of {size} bytes at offset {offset} is not within {self.num_pages} pages of "
                f"{self.page_bytes} bytes, or does not begin with a page"
            )
        return each

    def count(self, size: int) -> int:
        """Returns the number of pages of an object of `size` bytes."""
        return -(-size // self.page_bytes)

    def ids(self, objects: Iterable[Object]) -> PageIds:
        """Returns the pages of all objects in order. Raises ConfigError as `check` does."""
        runs = [
            np.arange(
                offset // self.page_bytes, offset // self.page_bytes + self.count(size), dtype=np.uint32
            )
            for offset, size in map(self.check, objects)
        ]
        return np.concatenate(runs) if runs else np.zeros(0, np.uint32)


@dataclass(slots=True)
class Batch:
    """The objects of a read that one offer covers: their places in the read, at the owner and here."""

    places: list[int] = field(default_factory=list)
    theirs: list[Object] = field(default_factory=list)
    ours: list[Object] = field(default_factory=list)
    num_pages: int = 0


def batches(pages: Pages, theirs: Sequence[Object], ours: Sequence[Object]) -> Iterator[Batch]:
    """Yields the batches of a read. An offer has at most MAX_BLOCKS pages, and each of them once.

    Raises ConfigError unless both sequences have objects of the same sizes.
    """
    if len(theirs) != len(ours):
        raise ConfigError(f"a read of {len(theirs)} objects into {len(ours)}; give as many of each")
    waiting = list(range(len(theirs)))
    while waiting:
        batch, later = Batch(), []
        offsets: set[int] = set()
        for place in waiting:
            (offset, size), (_, room) = theirs[place], pages.check(ours[place])
            count = pages.count(size)
            if size != room or count > MAX_BLOCKS:
                raise ConfigError(
                    f"object {place} of a read has {size} bytes at the peer and {room} here; they must be equal, "
                    f"and at most {MAX_BLOCKS} pages"
                )
            if offset in offsets or batch.num_pages + count > MAX_BLOCKS:
                later.append(place)
                continue
            offsets.add(offset)
            batch.places.append(place)
            batch.theirs.append(theirs[place])
            batch.ours.append(ours[place])
            batch.num_pages += count
        yield batch
        waiting = later
