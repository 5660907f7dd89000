# SPDX-License-Identifier: Apache-2.0
"""Hands requests over between processes that run continuous batching of Hugging Face transformers.

See docs/servers/transformers.md for how to use it and what each failure looks like.
"""

from __future__ import annotations

from .handoff import HandoffStats, KVLinkHandoff
from .handoff_message import Handoff
from .incoming import Landed

__all__ = ["Handoff", "HandoffStats", "KVLinkHandoff", "Landed"]
