# SPDX-License-Identifier: Apache-2.0
"""Calls that no client of kvlink makes, by a caller that is admitted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvlink.control import Security


@asynccontextmanager
async def raw_channel(address: str) -> AsyncIterator[Any]:
    channel = Security().coordinators().dial(address, ())
    yield channel
    await channel.close()
