# SPDX-License-Identifier: Apache-2.0
"""A peer of kvlink written from its formats alone, on pyverbs: a second opinion on the wire contract.

Shares with kvlink only what protos/kvlink/v1 generates. Raises ImportError where pyverbs cannot be had.
"""

from __future__ import annotations

import importlib.util
import sys

# Where distributions install it; a virtual environment does not look there.
_DISTRIBUTION = "/usr/lib/python3/dist-packages"

if importlib.util.find_spec("pyverbs") is None:
    sys.path.append(_DISTRIBUTION)
    try:
        import pyverbs.device  # noqa: F401  a package that was imported once is found again
    finally:
        sys.path.remove(_DISTRIBUTION)
