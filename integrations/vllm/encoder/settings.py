# SPDX-License-Identifier: Apache-2.0
"""Reads the options of the encoder connector: `ec_connector_extra_config`, then KVLINK_* of the environment."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvlink.config import CATALOGUE, WorkerConfig
from kvlink.errors import ConfigError

from .memory import MemoryShape

_log = logging.getLogger("vllm.kvlink")

_LOGGING = ("log", "log_json")  # vLLM configures its own logging
_POOL_MIB, _MOST_MIB = 1024, 1 << 20
_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """The connector's options. `worker` configures the kvlink worker in the scheduler's process."""

    worker: WorkerConfig
    pool_mib: int = _POOL_MIB
    """The size of the pool of encoder outputs, in host memory."""

    def shape(self, num_ranks: int) -> MemoryShape:
        """Returns the sizes of the pool's memory."""
        return MemoryShape((self.pool_mib << 20) // _BLOCK_BYTES, _BLOCK_BYTES, num_ranks)

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> EncoderSettings:
        """Reads `ec_connector_extra_config`: `pool_mib`, and WorkerConfig's fields except logging.

        Raises ConfigError.
        """
        names = {setting.name for setting in CATALOGUE}.difference(_LOGGING)
        unknown = sorted(set(extra) - names - {"pool_mib"})
        if unknown:
            _log.warning(
                "ec_connector_extra_config: kvlink does not know %s; it takes %s",
                ", ".join(unknown),
                ", ".join(sorted(names | {"pool_mib"})),
            )
        pool_mib = extra.get("pool_mib", _POOL_MIB)
        if type(pool_mib) is not int or not 1 <= pool_mib <= _MOST_MIB:
            raise ConfigError(f"ec_connector_extra_config: pool_mib={pool_mib!r} must be 1 to {_MOST_MIB}")
        # An item has a block at least, so that a slot for each block is enough for all items.
        defaults = {"lease_slots": min((pool_mib << 20) // _BLOCK_BYTES, 1 << 20), "inline_us": 0}
        ours = {name: value for name, value in extra.items() if name in names}
        try:
            return cls(WorkerConfig.from_env(defaults=defaults, **ours), pool_mib)
        except TypeError as error:
            raise ConfigError(f"ec_connector_extra_config: {error}") from None
