# SPDX-License-Identifier: Apache-2.0
"""Checks libfabric and its providers, only where KVLINK_TRANSPORTS names fabric: others never load it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from kvlink.config import WorkerConfig
from kvlink.doctor.verdict import Check, Verdict
from kvlink.errors import ConfigError, TransportUnavailable
from kvlink.transfer.transport_names import select

Providers = Callable[[str], Sequence[tuple[str, str, str]]]
"""Returns name, facts and why not of each provider, as `_core.fabric_providers` does."""


def checks(env: Mapping[str, str], transports: Sequence[str], providers: Providers) -> Iterator[Check]:
    """Yields a check for each provider, and one that says whether the chosen one is among them.

    `transports` are those of `_core.transports`.
    """
    try:
        config = WorkerConfig.from_env(env)
        chosen = select(config.transports, transports)
    except ConfigError:
        return  # software.options says so
    if not any(name.removeprefix("fault+") == "fabric" for name in chosen):
        return
    try:
        found = providers(config.host)
    except TransportUnavailable as error:
        yield Check("fabric", Verdict.FAIL, error.reason, error.fix)
        return
    for name, facts, why_not in found:
        yield Check(f"fabric {name}", Verdict.PASS, f"not used: {why_not}" if why_not else facts)
    wanted = config.fabric_provider
    if wanted and not any(name == wanted and not why_not for name, _, why_not in found):
        fix = "set KVLINK_FABRIC_PROVIDER to one of those that pass, at both ends"
        yield Check("fabric provider", Verdict.FAIL, f"{wanted} is not among them, or cannot be used", fix)
