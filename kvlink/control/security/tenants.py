# SPDX-License-Identifier: Apache-2.0
"""The file that maps certificates and tokens to tenants: JSON, a list of rules, the first that fits decides.

    [{"tenant": "acme", "identity": "spiffe://example.org/ns/acme/*"},
     {"tenant": "acme", "token_sha256": "9f86d0…", "role": "observer"},
     {"tenant": "*", "identity": "grafana.example.org", "role": "observer"}]

identity: a name in the certificate's subjectAltName; a * at its end stands for any rest.
token_sha256: of the token, in hexadecimal, so that the file is no secret. role: worker (default) or observer.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvlink.control.refusal import Reason, Refused
from kvlink.control.security.callers import EVERY_TENANT, Caller, Role, check_right
from kvlink.control.security.names import listed, tenant_name
from kvlink.control.security.reloading_file import LOOK_EVERY_S, Watched
from kvlink.control.security.tokens import digest
from kvlink.errors import ConfigError

_MAX_BYTES = 4 << 20
_MAX_KNOWN = 4_096
"""Callers whose rule is remembered."""
_FIELDS = {"tenant", "identity", "token_sha256", "role"}
_HEX = set("0123456789abcdef")


class Rule(NamedTuple):
    """`identity` or `token_sha256` is "": certificates are compared to the one, tokens to the other."""

    who: Caller
    identity: str
    token_sha256: str

    def fits(self, names: Sequence[str], token_sha256: str) -> bool:
        """Whether the rule is for the holder of a certificate with these names, or of a token."""
        if self.token_sha256 or token_sha256:
            return self.token_sha256 == token_sha256
        if self.identity.endswith("*"):
            return any(name.startswith(self.identity[:-1]) for name in names)
        return self.identity in names


class Rules:
    """In the order of the file."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self.who = functools.lru_cache(_MAX_KNOWN)(self._who)
        """(names in the certificate, token or "") -> who that is, or None. A token decides alone."""

    def __repr__(self) -> str:
        return f"{len(self._rules)} rules"

    def _who(self, names: tuple[str, ...], token: str) -> Caller | None:
        token_sha256 = digest(token) if token else ""
        return next((rule.who for rule in self._rules if rule.fits(names, token_sha256)), None)


class TenantsFile(Watched[Rules]):
    """A `Gate` by the file's rules. Raises ConfigError for a file that cannot be read or is malformed."""

    def __init__(self, path: Path, look_every_s: float = LOOK_EVERY_S) -> None:
        super().__init__([path], lambda: Rules(parse(_read(path), str(path))), look_every_s)

    def __call__(self, method: str, names: Sequence[str], token: str) -> Caller:
        """Raises Refused (DENIED)."""
        who = self.current().who(tuple(names), token)
        if who is None:
            asked = "your token" if token else f"a certificate with {listed(names)}"
            raise Refused(Reason.DENIED, f"no rule of the coordinator's tenants file is for {asked}; add one")
        check_right(who, method)
        return who


def parse(text: bytes, where: str) -> list[Rule]:
    """Raises ConfigError that names the rule."""
    try:
        listing = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(listing, list):
        raise ConfigError(f"{where} must hold a list of rules")
    return [_rule(given, f"rule {number} of {where}") for number, given in enumerate(listing, 1)]


def _rule(given: Any, where: str) -> Rule:
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise ConfigError(f"{where} must be an object whose values are texts")
    if unknown := given.keys() - _FIELDS:
        raise ConfigError(f"{where} has {', '.join(sorted(unknown))}; known are {', '.join(sorted(_FIELDS))}")
    tenant, identity, token_sha256 = (given.get(name, "") for name in ("tenant", "identity", "token_sha256"))
    if bool(identity) == bool(token_sha256):
        raise ConfigError(f"{where} needs either identity or token_sha256")
    if token_sha256 and (len(token_sha256) != 64 or set(token_sha256) - _HEX):
        raise ConfigError(f"{where}: token_sha256 is 64 hexadecimal digits; `kvlink certs token` prints them")
    try:
        role = Role(given.get("role", "worker"))
    except ValueError:
        raise ConfigError(f"{where}: role is worker or observer, not {given['role']!r}") from None
    if tenant != EVERY_TENANT:
        tenant_name(tenant)
    elif role is not Role.OBSERVER:
        raise ConfigError(f"{where}: tenant * is for observers; a worker is of one tenant")
    return Rule(Caller(tenant, role), identity, token_sha256)


def _read(path: Path) -> bytes:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the tenants file {path}: {error.strerror}") from None
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"{path} has {len(text)} bytes, at most {_MAX_BYTES} are taken")
    return text
