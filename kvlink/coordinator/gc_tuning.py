# SPDX-License-Identifier: Apache-2.0
"""Tunes the garbage collector for a coordinator process."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 50_000
"""Python's default of 700 costs a quarter of a coordinator's time (`kvlink bench control`)."""


def tune_gc() -> None:
    """Makes garbage collection rare. Call it after the process has imported everything, and before it serves.

    Nothing that a call leaves is part of a reference cycle, so collecting it frees nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 20, 20)
