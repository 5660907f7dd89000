# SPDX-License-Identifier: Apache-2.0
"""Maps LMCache's memory onto a kvlink pool: a page of `align_bytes` is a block, and an object is a run of pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvlink import BlockPool
from kvlink.errors import ConfigError
from kvlink.layout import Geometry, dense
from kvlink.ticket import MAX_BLOCKS
from kvlink.transfer.pool import Region

Object = tuple[int, int]
"""Offset and size of an object in LMCache's memory, in bytes."""

Name = tuple[str, str, int, int, str]
"""LMCache's key of an object: its hash in hexadecimal, model, rank, object group and salt."""

PageIds = npt.NDArray[np.uint32]

MOST_OBJECTS = 4096
"""The most objects that one ask names. A longer read consists of several."""

_MODEL = "LMCache L1"


class Wanted(NamedTuple):
    """An object that a reader asks for. Without a name it means the first object that was ever at this place."""

    offset: int
    size: int
    name: Name | None = None


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

    def problem(self, offset: object, size: object) -> str:
        """Returns why this is no object of the memory, or "". Any values are allowed."""
        if type(offset) is not int or type(size) is not int:
            return "the offset and the size of an object must be integers"
        if offset % self.page_bytes or offset < 0 or size < 1:
            return f"an object of {size} bytes at offset {offset} has no page or does not begin with one"
        if offset + size > self.num_pages * self.page_bytes:
            return (
                f"an object of {size} bytes at offset {offset} ends beyond {self.num_pages} pages of "
                f"{self.page_bytes} bytes"
            )
        return (
            f"an object of more than {MAX_BLOCKS} pages; raise --l1-align-bytes on all servers"
            if self.count(size) > MAX_BLOCKS
            else ""
        )

    def count(self, size: int) -> int:
        """Returns the number of pages of an object of `size` bytes."""
        return -(-size // self.page_bytes)

    def ids(self, objects: Iterable[Object]) -> PageIds:
        """Returns the pages of all objects in order. `problem` must have found nothing."""
        runs = [
            np.arange(
                offset // self.page_bytes, offset // self.page_bytes + self.count(size), dtype=np.uint32
            )
            for offset, size in objects
        ]
        return np.concatenate(runs) if runs else np.zeros(0, np.uint32)


@dataclass(slots=True)
class Batch:
    """The objects of a read that one offer covers: their places in the read, at the owner and here."""

    places: list[int] = field(default_factory=list)
    theirs: list[Wanted] = field(default_factory=list)
    ours: list[Object] = field(default_factory=list)
    num_pages: int = 0


def mismatch(pages: Pages, theirs: Wanted, ours: Object) -> str:
    """Returns why the owner's object cannot be read into ours, or ""."""
    if problem := pages.problem(*ours):
        return problem
    if type(theirs.offset) is not int or theirs.offset < 0 or theirs.size != ours[1]:
        return "the object has other sizes at the peer and here; the servers must run the same model and chunk size"
    return ""


def batches(
    pages: Pages, theirs: Sequence[Wanted], ours: Sequence[Object], places: Iterable[int]
) -> Iterator[Batch]:
    """Yields the batches of a read of the objects at `places`, in which `mismatch` has found nothing.

    An offer has at most MAX_BLOCKS pages, each of them once, and at most MOST_OBJECTS objects.
    """
    waiting = list(places)
    while waiting:
        batch, later = Batch(), []
        offsets: set[int] = set()
        for place in waiting:
            wanted = theirs[place]
            count = pages.count(wanted.size)
            is_full = batch.num_pages + count > MAX_BLOCKS or len(offsets) == MOST_OBJECTS
            if wanted.offset in offsets or is_full:
                later.append(place)
                continue
            offsets.add(wanted.offset)
            batch.places.append(place)
            batch.theirs.append(wanted)
            batch.ours.append(ours[place])
            batch.num_pages += count
        yield batch
        waiting = later
