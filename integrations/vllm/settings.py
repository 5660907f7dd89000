# SPDX-License-Identifier: Apache-2.0
"""Reads the connector's options: `kv_connector_extra_config`, then KVLINK_* of the environment, then defaults."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvlink.config import CATALOGUE, WorkerConfig
from kvlink.errors import ConfigError

_log = logging.getLogger("vllm.kvlink")

# The default if neither is given. Pulls do not run on the calling thread, which has a model to run.
_DEFAULTS = {"lease_slots": 1 << 15, "inline_us": 0}
# These belong to every process of the server, and only the workers' see this connector's options.
_SECURITY = ("tls_ca", "tls_cert", "tls_key", "tls_hosts", "token_file", "ticket_keys", "insecure")
_LOGGING = ("log", "log_json")  # vLLM configures its own logging
_SEATS = 8
_STREAMING_FROM = 2048  # vLLM's smallest default chunk; in shorter prompts nothing overlaps

_STREAMING = ("predicted", "always")
_ANSWER_S = 600  # a client's next turn comes within minutes, or its tokens are no longer in the cache
_OURS = ("seats", "streaming_from_tokens", "streaming", "bidirectional", "answer_s", "share_prefixes")


@dataclass(frozen=True, slots=True)
class Settings:
    """The connector's options. `worker` configures the kvlink worker of each rank."""

    worker: WorkerConfig
    seats: int = _SEATS
    """The number of decode ranks that may read one prefill rank, and of a request's slots at the prefill server."""
    streaming_from_tokens: int = _STREAMING_FROM
    """Prompts of at least this length are handed off in chunks, if the router asks and there is a coordinator."""
    streams_always: bool = False
    """Whether decode pulls each chunk as soon as it is computed, even if that is predicted not to pay."""

    bidirectional: bool = False
    """Whether the server offers its answers to the next turns, and pulls those of others."""
    answer_s: int = _ANSWER_S
    """The seconds after which such an offer expires."""
    share_prefixes: bool = False
    """Whether the server publishes the prefixes in its cache, and pulls those of others that its cache lacks."""

    @property
    def pinning_slots(self) -> int:
        """The lease slots of offers that pin blocks. The last eighth is for soft offers, if there are some."""
        slots = self.worker.lease_slots
        return slots - max(slots // 8, 1) if self.offers_softly else slots

    @property
    def offers_softly(self) -> bool:
        """Whether the server offers what is in its cache."""
        return self.bidirectional or self.share_prefixes

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        """Reads `kv_connector_extra_config`: the connector's fields, and WorkerConfig's except security and logging.

        Raises ConfigError.
        """
        _check_security(extra)
        names = {setting.name for setting in CATALOGUE}.difference(_SECURITY, _LOGGING)
        ours = {name: value for name, value in extra.items() if name in names}
        unknown = sorted(set(extra) - names - set(_OURS))
        if unknown:
            _log.warning(
                "kv_connector_extra_config: kvlink does not know %s; it takes %s",
                ", ".join(unknown),
                ", ".join(sorted(names.union(_OURS))),
            )
        seats = _number(extra, "seats", _SEATS, 1, 255)
        streaming_from = _number(extra, "streaming_from_tokens", _STREAMING_FROM, 0, 2**31)
        streaming = extra.get("streaming", _STREAMING[0])
        if streaming not in _STREAMING:
            raise ConfigError(
                f"kv_connector_extra_config: streaming={streaming!r} must be one of {_STREAMING}"
            )
        bidirectional, shares = (_switch(extra, name) for name in ("bidirectional", "share_prefixes"))
        answer_s = _number(extra, "answer_s", _ANSWER_S, 1, 30 * 86400)
        try:
            worker = WorkerConfig.from_env(defaults=_DEFAULTS, **ours)
        except TypeError as error:
            raise ConfigError(f"kv_connector_extra_config: {error}") from None
        if shares and not worker.coordinator:
            raise ConfigError(
                "kv_connector_extra_config: share_prefixes needs the directory of a coordinator; set KVLINK_COORDINATOR"
            )
        return cls(worker, seats, streaming_from, streaming == "always", bidirectional, answer_s, shares)


def _check_security(extra: Mapping[str, Any]) -> None:
    misplaced = {s.name: s.env for s in CATALOGUE if s.name in _SECURITY and s.name in extra}
    if misplaced:
        raise ConfigError(
            f"kv_connector_extra_config cannot set {', '.join(misplaced)}, because vLLM's scheduler also "
            f"needs them and has only the environment; set {', '.join(misplaced.values())} there"
        )


def _switch(extra: Mapping[str, Any], name: str) -> bool:
    value = extra.get(name, False)
    if type(value) is not bool:
        raise ConfigError(f"kv_connector_extra_config: {name}={value!r} must be true or false")
    return value


def _number(extra: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = extra.get(name, default)
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"kv_connector_extra_config: {name}={value!r} must be {least} to {most}")
    return value


def streams_from(settings: Settings, scheduler_config: Any) -> int:
    """Returns the tokens of the shortest prompt that vLLM computes by chunks and that may be handed off by them."""
    chunk = int(scheduler_config.max_num_batched_tokens)
    most_of_one = int(getattr(scheduler_config, "long_prefill_token_threshold", 0) or 0)
    return max(settings.streaming_from_tokens, 1 + (min(chunk, most_of_one) if most_of_one > 0 else chunk))
