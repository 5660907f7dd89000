# SPDX-License-Identifier: Apache-2.0
"""Transports as people name them in KVLINK_TRANSPORTS and on the command line."""

from __future__ import annotations

from collections.abc import Sequence

from kvlink.errors import ConfigError

_ALIASES = {"rdma": "verbs"}


def select(spec: str, available: Sequence[str]) -> list[str]:
    """Transports that `spec` allows, best first. `available` are the names built in, best first.

    "" and "all" allow all; "shm,tcp" only these, in this order; "^cma,tcp" all but these; "fault+shm" wraps one. rdma
    is another name of verbs. Raises ConfigError for unknown names, a mixture of forms, and a choice that leaves none.
    """
    forbids = spec.strip().startswith("^")
    written = [name.strip() for name in spec.strip().removeprefix("^").split(",") if name.strip()]
    if written == ["all"] and not forbids:
        return list(available)
    names = [_plain_name(name) for name in written]
    for name, said in zip(names, written, strict=True):
        if name.removeprefix("fault+") not in available or (forbids and "+" in name):
            raise ConfigError(
                f"there is no transport {said!r} (of {spec!r}); write names out of {', '.join(available)}, "
                "fault+NAME to wrap one, ^ before the first to forbid them all, or all alone"
            )
    chosen = [name for name in available if name not in names] if forbids or not names else names
    if not chosen:
        raise ConfigError(f"{spec!r} forbids every transport; allow at least one (KVLINK_TRANSPORTS)")
    return list(dict.fromkeys(chosen))


def _plain_name(name: str) -> str:
    fault, _, bare = name.rpartition("+")
    return f"{fault}+{_ALIASES.get(bare, bare)}" if fault else _ALIASES.get(bare, bare)
