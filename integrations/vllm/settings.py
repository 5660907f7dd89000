# SPDX-License-Identifier: Apache-2.0
"""Options of the connector: `kv_connector_extra_config`, then KVLINK_* of the environment, then defaults."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvlink.config import WorkerConfig
from kvlink.errors import ConfigError

_log = logging.getLogger("vllm.kvlink")

# Pulls never run on the thread that calls us: it has a model to run.
_DEFAULTS = {"lease_slots": 1 << 15, "inline_bytes": 0}
_SEATS = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """`worker` configures the kvlink worker of each rank."""

    worker: WorkerConfig
    seats: int = _SEATS
    """Decode ranks that may read one prefill rank. Slots a request takes at the prefill server."""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        """Reads `kv_connector_extra_config`: "seats" and every field of WorkerConfig. Raises ConfigError."""
        names = {field.name for field in fields(WorkerConfig)}
        ours = {name: value for name, value in extra.items() if name in names}
        unknown = sorted(set(extra) - names - {"seats"})
        if unknown:
            _log.warning(
                "kv_connector_extra_config: kvlink does not know %s; it takes seats, %s",
                ", ".join(unknown),
                ", ".join(sorted(names)),
            )
        seats = extra.get("seats", _SEATS)
        if not isinstance(seats, int) or not 1 <= seats <= 255:
            raise ConfigError(f"kv_connector_extra_config: seats={seats!r} must be 1 to 255")
        try:
            return cls(WorkerConfig.from_env(**(_DEFAULTS | ours)), seats)
        except TypeError as error:
            raise ConfigError(f"kv_connector_extra_config: {error}") from None
