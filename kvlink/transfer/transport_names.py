# SPDX-License-Identifier: Apache-2.0
"""Parses the names of transports in KVLINK_TRANSPORTS and on the command line."""

from __future__ import annotations

from collections.abc import Sequence

from kvlink.errors import ConfigError

_ALIASES = {"rdma": "verbs"}

NAMED_ONLY = ("fabric",)
"""Transports that are used, and looked for, only where they are named."""


def select(spec: str, available: Sequence[str]) -> list[str]:
    """Returns the transports that `spec` allows, best first. `available` lists the built-in names, best first.

    "" and "all" allow all transports. "shm,tcp" allows only these, in this order, and "^cma,tcp" allows all others.
    "fault+shm" wraps one. rdma is another name of verbs. NAMED_ONLY are allowed only by name. Raises ConfigError for
    unknown names, for a mixture of forms, and if no transport is left.
    """
    forbids = spec.strip().startswith("^")
    written = [name.strip() for name in spec.strip().removeprefix("^").split(",") if name.strip()]
    if spec.strip() and not written:
        raise ConfigError(f"{spec!r} names no transport; write some of {', '.join(available)}, or all")
    if written == ["all"] and not forbids:
        return list(available)
    names = [_plain_name(name) for name in written]
    for name, given in zip(names, written, strict=True):
        if name.removeprefix("fault+") not in (*available, *NAMED_ONLY) or (forbids and "+" in name):
            raise ConfigError(
                f"there is no transport {given!r} (in {spec!r}); write some of {', '.join((*available, *NAMED_ONLY))}, "
                "fault+NAME to wrap one, ^ before the first to forbid the listed ones, or all alone"
            )
    chosen = [name for name in available if name not in names] if forbids or not names else names
    if not chosen:
        raise ConfigError(f"{spec!r} forbids every transport; allow at least one (KVLINK_TRANSPORTS)")
    return list(dict.fromkeys(chosen))


def _plain_name(name: str) -> str:
    fault, _, bare = name.rpartition("+")
    return f"{fault}+{_ALIASES.get(bare, bare)}" if fault else _ALIASES.get(bare, bare)
