# SPDX-License-Identifier: Apache-2.0
"""This package is the coordinator process. It keeps the joined workers, and the tickets offered for each request."""

from kvlink.coordinator.coordinator import Coordinator, serve

__all__ = ["Coordinator", "serve"]
