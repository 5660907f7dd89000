# SPDX-License-Identifier: Apache-2.0
"""Hands off requests between processes that run continuous batching of Hugging Face transformers.

docs/servers/transformers.md describes how to use it, and each failure.
"""

from __future__ import annotations

from .handoff import HandoffStats, KVLinkHandoff
from .handoff_message import Handoff, Prefix
from .incoming import Landed

__all__ = ["Handoff", "HandoffStats", "KVLinkHandoff", "Landed", "Prefix"]
