# SPDX-License-Identifier: Apache-2.0
"""Finds environment variables that look like options of kvlink but are not, most likely because of a typing error."""

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
    """Returns each unknown KVLINK_* variable with the nearest known name, or "".

    The result excludes variables that Kubernetes sets in each pod for a Service named kvlink-something.
    """
    services = tuple(name.removesuffix(_SERVICE) for name in env if name.endswith(_SERVICE))
    links = tuple(f"{service}{part}" for service in services for part in ("_SERVICE_", "_PORT"))
    names = (name for name in env if name.startswith(PREFIX) and name not in known)
    return {
        name: _nearest(name, known) for name in sorted(names) if not name.startswith((_FOR_TESTS, *links))
    }


def advice(name: str, nearest: str) -> str:
    """Returns what to do about the unknown variable `name`. `nearest` is the value that `unknown` gives for it."""
    return f"did you mean {nearest}?" if nearest else "`kvlink config` lists the options"


def warn_once(env: Mapping[str, str], known: Collection[str]) -> None:
    """Logs each unknown variable once per process, because the intended option keeps its default."""
    for name, nearest in unknown(env, known).items():
        if name not in _warned:
            _warned.add(name)
            _log.warning("%s is no option of kvlink and has no effect; %s", name, advice(name, nearest))


def _nearest(name: str, known: Collection[str]) -> str:
    bare = {each.removeprefix(PREFIX): each for each in known}
    found = get_close_matches(name.removeprefix(PREFIX), bare, n=1)
    return bare[found[0]] if found else ""
