# SPDX-License-Identifier: Apache-2.0
"""What tests of pools on a GPU share. tests/fake_cuda stands for the GPU and its driver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transports.processes import PeerProcess, RemoteWorker

ON_HOST = "kvlink"
LEAST = 4 << 20
"""Bytes of the smallest bounce buffer."""
SOURCES = sorted((Path(__file__).parents[1] / "fake_cuda").glob("*.cc"))

Open = Callable[..., tuple[RemoteWorker, RemoteWorker]]
Holdable = Callable[..., tuple[PeerProcess, RemoteWorker, RemoteWorker, Path]]
