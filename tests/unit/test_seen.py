# SPDX-License-Identifier: Apache-2.0
"""How tests see the memory of a real GPU (tests/transports/seen.py), over a tensor that a CPU can check."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transports.seen import seen

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvlink[torch]'")

_BYTES = 4096


def _memory() -> tuple[np.ndarray[Any, Any], Any]:
    """Returns memory of the device, and the tests' view of it."""
    tensor = torch.arange(_BYTES).to(torch.uint8)
    return tensor.numpy(), seen(tensor)


@pytest.mark.parametrize("key", [slice(None), slice(5, 700), 7, [3, 1000, 4], np.arange(_BYTES) % 3 == 0])
def test_what_is_written_is_sent(key: Any) -> None:
    device, view = _memory()
    wanted = device.copy()
    wanted[key] = view[key] = 0xA5
    assert np.array_equal(device, wanted)


def test_views_of_it_send_and_fetch_too() -> None:
    device, view = _memory()
    blocks, words = view.reshape(16, -1), view.view(np.uint64).reshape(16, -1)
    blocks[[2, 9]] = 1
    words[4, 3] = 0x0102030405060708
    assert (device.reshape(16, -1)[[2, 9]] == 1).all()
    assert device.view(np.uint64)[4 * 32 + 3] == 0x0102030405060708
    device[:] = 9
    assert (blocks[:] == 9).all()
    assert words[15, 0] == 0x0909090909090909


def test_what_was_looked_at_stays_as_it_was() -> None:
    device, view = _memory()
    looked_at = view[:100]
    device[:] = 9
    assert np.array_equal(looked_at, np.arange(100))
    looked_at[:] = 0
    assert (device == 9).all()


def test_pages_that_nobody_wrote_are_not_sent() -> None:
    """They may be landing meanwhile."""
    device, view = _memory()
    copy = view.copy_of
    before = copy.bytes.copy()
    copy.bytes[300] ^= 0xFF
    device[1000:] = 9
    copy.send(before)
    assert (device[1000:] == 9).all()
    assert device[300] == 300 % 256 ^ 0xFF
