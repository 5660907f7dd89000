# SPDX-License-Identifier: Apache-2.0
"""This package is the coordinator process. It keeps the joined workers, and the tickets offered for each request."""

from kvlink.coordinator.coordinator import DEFAULT_PORT, Coordinator, serve

__all__ = ["DEFAULT_PORT", "Coordinator", "serve"]
