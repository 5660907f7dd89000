# SPDX-License-Identifier: Apache-2.0
"""Memory of a GPU as tests see it: an array that fetches what it shows, and sends what is written."""

from __future__ import annotations

from typing import Any

import numpy as np

_PAGE_BYTES = 256


class _Copy:
    """Holds a copy of a region. Only pages that were written are sent, because others may be written meanwhile."""

    def __init__(self, device: Any) -> None:
        import torch

        self._device = device
        self._host = torch.zeros(device.numel(), dtype=torch.uint8)
        self.bytes = self._host.numpy()

    def fetch(self) -> None:
        self._host.copy_(self._device)

    def send(self, before: np.ndarray[Any, Any]) -> None:
        for start, end in _runs(before != self.bytes):
            part = slice(start * _PAGE_BYTES, end * _PAGE_BYTES)
            self._device[part].copy_(self._host[part])


def _runs(changed: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """Neighbouring pages with a changed byte, as (first, one past the last): one copy each."""
    starts = np.arange(0, changed.size, _PAGE_BYTES)
    pages = np.concatenate([[False], np.logical_or.reduceat(changed, starts), [False]])
    edges = np.flatnonzero(pages[1:] != pages[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


class _Seen(np.ndarray[Any, Any]):
    copy_of: _Copy | None = None

    def __array_finalize__(self, source: object) -> None:
        self.copy_of = getattr(source, "copy_of", None)

    def __getitem__(self, key: Any) -> Any:
        if self.copy_of is not None:
            self.copy_of.fetch()
        found = super().__getitem__(key)
        return np.array(found) if isinstance(found, np.ndarray) else found

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.copy_of is None:
            return super().__setitem__(key, value)
        self.copy_of.fetch()
        before = self.copy_of.bytes.copy()
        self.view(np.ndarray)[key] = value  # numpy assigns to what __getitem__ of a subclass returns
        self.copy_of.send(before)
        return None


def seen(device: Any) -> _Seen:
    """A view of a flat uint8 tensor. Views of it fetch and send as well; what is indexed is a copy."""
    copy = _Copy(device)
    copy.fetch()
    array = copy.bytes.view(_Seen)
    array.copy_of = copy
    return array
