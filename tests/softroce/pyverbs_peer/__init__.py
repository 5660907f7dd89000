# SPDX-License-Identifier: Apache-2.0
"""A peer of kvlink written from its formats alone, on pyverbs: a second opinion on the wire contract.

Shares with kvlink only what protos/kvlink/v1 generates. `formats` works without pyverbs; the other modules raise
ImportError where it cannot be had.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import suppress

# Where distributions install it; a virtual environment does not look there.
_DISTRIBUTION = "/usr/lib/python3/dist-packages"

if importlib.util.find_spec("pyverbs") is None:
    sys.path.append(_DISTRIBUTION)
    with suppress(ImportError):  # told by whoever needs it
        import pyverbs.device  # noqa: F401  a package that was imported once is found again
    sys.path.remove(_DISTRIBUTION)
