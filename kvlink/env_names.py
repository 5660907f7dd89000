# SPDX-License-Identifier: Apache-2.0
"""Environment variables that look like options of kvlink and are none: most likely misspelt."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from difflib import get_close_matches

_log = logging.getLogger("kvlink.config")

PREFIX = "KVLINK_"
_FOR_TESTS = "KVLINK_TEST_"
_SERVICE = "_SERVICE_HOST"
_warned: set[str] = set()


def unknown(env: Mapping[str, str], known: Collection[str]) -> dict[str, str]:
    """Each such variable with the known name that is nearest to it, or "".

    Variables that Kubernetes sets in each pod for a Service called kvlink-something are left out.
    """
    services = tuple(name.removesuffix(_SERVICE) for name in env if name.endswith(_SERVICE))
    links = tuple(f"{service}{part}" for service in services for part in ("_SERVICE_", "_PORT"))
    names = (name for name in env if name.startswith(PREFIX) and name not in known)
    return {
        name: _nearest(name, known) for name in sorted(names) if not name.startswith((_FOR_TESTS, *links))
    }


def advice(name: str, nearest: str) -> str:
    """What to do about one."""
    return f"did you mean {nearest}?" if nearest else "`kvlink config` lists the options"


def warn_once(env: Mapping[str, str], known: Collection[str]) -> None:
    """Logs each such variable once in a process: the option that was meant has its default instead."""
    for name, nearest in unknown(env, known).items():
        if name not in _warned:
            _warned.add(name)
            _log.warning("%s is no option of kvlink and has no effect; %s", name, advice(name, nearest))


def _nearest(name: str, known: Collection[str]) -> str:
    bare = {each.removeprefix(PREFIX): each for each in known}
    found = get_close_matches(name.removeprefix(PREFIX), bare, n=1)
    return bare[found[0]] if found else ""
