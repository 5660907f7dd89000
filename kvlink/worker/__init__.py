# SPDX-License-Identifier: Apache-2.0
"""The public Worker: a member of a deployment that offers its blocks and pulls those of others."""

from kvlink.worker.sources import Tickets
from kvlink.worker.worker import Worker

__all__ = ["Tickets", "Worker"]
