# SPDX-License-Identifier: Apache-2.0
"""Checks what bootstrap servers answer, and what prefill ranks register there, before SGLang uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlink.errors import ConfigError

NOWHERE = "bootstrap-host.invalid"
"""Stands for a bootstrap_host that is no text. No name of a host ends like this one."""
_MAX_RANKS = 4096
_MAX_HOST_CHARS = 255
_SIZES = ("attn_tp_size", "attn_cp_size", "pp_size")


def problem_of_address(bootstrap_addr: str) -> str:
    """Returns why a request cannot have this address of a bootstrap server, or ""."""
    host, _, port = bootstrap_addr.rpartition(":")
    try:
        _check_host(host.removeprefix("[").removesuffix("]"), "bootstrap_host")
        _integer(port, "bootstrap_port", 1, 65535)
    except ConfigError as error:
        return str(error)
    return "bootstrap_host must be a text" if host == NOWHERE else ""


def checked_rank(answer: object) -> dict[str, Any]:
    """Returns what a bootstrap server said of a prefill rank, with a host and a port. Raises ConfigError."""
    if not isinstance(answer, dict):
        raise ConfigError(f"the bootstrap server describes a rank by a {type(answer).__name__}")
    _check_host(answer.get("rank_ip"), "rank_ip")
    return answer | {"rank_port": _integer(answer.get("rank_port"), "rank_port", 1, 65535)}


def check_server(info: Any) -> None:
    """Raises ConfigError for a description of a prefill server from which no rank mapping can be computed."""
    for name in (*_SIZES, "dp_size"):
        _integer(getattr(info, name, None), name, 1, _MAX_RANKS)


def checked_dp_ranks(answer: object) -> dict[str, int]:
    """Returns the data-parallel ranks by room, without what is none."""
    if not isinstance(answer, dict):
        return {}
    return {
        str(room): rank
        for room, rank in answer.items()
        if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < _MAX_RANKS
    }


def check_registration(data: object, registered: Mapping[str, Any]) -> None:
    """Raises ConfigError for a rank that cannot belong to this prefill server.

    registered: the sizes that the first rank registered, None before that.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"a rank is registered by a {type(data).__name__}, not by an object")
    sizes = {name: _integer(data.get(name), name, 1, _MAX_RANKS) for name in _SIZES}
    for kind in ("attn_tp", "attn_cp", "pp", "attn_dp", "system_dp"):
        size = _integer(data.get(f"{kind}_size"), f"{kind}_size", 1, _MAX_RANKS)
        # SGLang may register a data-parallel rank beside a size of 1.
        _integer(data.get(f"{kind}_rank"), f"{kind}_rank", 0, _MAX_RANKS if "dp" in kind else size - 1)
    for name in _SIZES:
        if registered.get(name) not in (None, sizes[name]):
            raise ConfigError(
                f"{name} is {registered[name]} for the ranks that are registered, not {sizes[name]}"
            )
    _integer(data.get("page_size"), "page_size", 1, 1 << 20)
    _integer(data.get("rank_port"), "rank_port", 1, 65535)
    _check_host(data.get("rank_ip"), "rank_ip")


def _check_host(host: object, name: str) -> None:
    if not isinstance(host, str) or not 0 < len(host) <= _MAX_HOST_CHARS or not host.isascii():
        raise ConfigError(f"{name} {host!r:.60} is no host")
    if not host.isprintable() or any(char in host for char in " /?#@"):
        raise ConfigError(f"{name} {host!r:.60} is no host")


def _integer(value: object, name: str, least: int, most: int) -> int:
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 10 else value
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        raise ConfigError(f"{name} must be an integer from {least} to {most}, not {value!r:.40}")
    return number
