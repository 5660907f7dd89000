# SPDX-License-Identifier: Apache-2.0
"""The garbage collector of a process that is a coordinator."""

from __future__ import annotations

import gc

_NEW_OBJECTS = (
    50_000  # 700 in Python: then a quarter of a coordinator's time goes into it (`kvlink bench control`)
)


def collect_seldom() -> None:
    """Call once the process has imported what it needs, before it serves.

    Tickets and claims are held in no cycles, so looking through them frees nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 20, 20)
