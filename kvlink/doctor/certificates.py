# SPDX-License-Identifier: Apache-2.0
"""Checks certificates: whether this process can communicate with other hosts, and until when."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from kvlink.config import WorkerConfig
from kvlink.config.addresses import is_loopback
from kvlink.control import Security
from kvlink.control.security.keys import expiry, listed
from kvlink.doctor.verdict import Check, Verdict
from kvlink.errors import ConfigError

_SOON_S = 24 * 3600.0
_HOW = "set KVLINK_TLS_CA, KVLINK_TLS_CERT and KVLINK_TLS_KEY; `kvlink certs` makes them for development"


def checks(env: Mapping[str, str]) -> Iterator[Check]:
    """Yields every check of this module, in the order in which they are shown."""
    try:
        config = WorkerConfig.from_env(env)
    except ConfigError:  # the check of the options reports it
        return
    yield certificates(config)


def certificates(config: WorkerConfig, clock: Callable[[], float] = time.time) -> Check:
    """Loads the certificates as a worker does, and reports their names and expiry. `clock` is the wall clock."""
    name = "certificates"
    try:
        security = Security.of(config)
    except ConfigError as error:
        return Check(name, Verdict.FAIL, str(error), _HOW)
    ring, tokens = security.keyring, security.host_tokens()
    if ring is not None:
        keys = ring.current()
        evidence = f"{listed(keys.names)}; {expiry(keys.expires_at)}"
        if keys.expires_at > clock() + _SOON_S:
            return Check(name, Verdict.PASS, evidence)
        return Check(name, Verdict.WARN, evidence, "renew it; running processes reload it")
    if config.insecure:
        return Check(
            name, Verdict.WARN, "none, and plaintext to other hosts is allowed (KVLINK_INSECURE)", _HOW
        )
    if is_loopback(config.host) and tokens is not None:
        tokens.shown()
        return Check(
            name, Verdict.PASS, f"none: plaintext, on this host alone, with {tokens.describe_admitted()}"
        )
    return Check(name, Verdict.FAIL, f"none, and KVLINK_HOST={config.host} is not loopback", _HOW)
