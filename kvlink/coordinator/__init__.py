# SPDX-License-Identifier: Apache-2.0
"""The coordinator process: which workers are members, and which tickets wait for which requests."""

from kvlink.coordinator.coordinator import DEFAULT_PORT, Coordinator, serve

__all__ = ["DEFAULT_PORT", "Coordinator", "serve"]
