# SPDX-License-Identifier: Apache-2.0
"""Implements the public Worker, a member of a deployment that offers its blocks and pulls blocks from others."""

from kvlink.worker.worker import Worker

__all__ = ["Worker"]
