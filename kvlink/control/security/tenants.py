# SPDX-License-Identifier: Apache-2.0
"""Reads the file that maps certificates and tokens to tenants: a JSON list of rules. The first rule that fits decides.

    [{"tenant": "acme", "identity": "spiffe://example.org/ns/acme/*"},
     {"tenant": "acme", "token_sha256": "9f86d0…", "role": "observer"},
     {"tenant": "*", "identity": "grafana.example.org", "role": "observer"}]

identity is a name in the certificate's subjectAltName. A * at its end matches any suffix.
token_sha256 is the SHA-256 of the token in hexadecimal, so the file need not be secret.
role is worker (the default) or observer.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvlink.control.refusal import Reason, RefusedError
from kvlink.control.security.callers import EVERY_TENANT, Caller, Role, check_right
from kvlink.control.security.keys import listed, tenant_name
from kvlink.control.security.own_file import mode_of
from kvlink.control.security.reloading_file import LOOK_EVERY_S, ReloadingFile
from kvlink.control.security.tokens import digest
from kvlink.errors import ConfigError

_MAX_BYTES = 4 << 20
_MAX_KNOWN = 4_096
"""Number of callers whose rule is cached."""
_FIELDS = {"tenant", "identity", "token_sha256", "role"}
_HEX = set("0123456789abcdef")


class Rule(NamedTuple):
    """Maps certificates or tokens to a caller.

    Either `identity` or `token_sha256` is "": certificates are compared to `identity`, and tokens to `token_sha256`.
    """

    caller: Caller
    identity: str
    token_sha256: str

    def fits(self, names: Sequence[str], token_sha256: str) -> bool:
        """Returns whether the rule fits a certificate with these names, or a token."""
        if self.token_sha256 or token_sha256:
            return self.token_sha256 == token_sha256
        if self.identity.endswith("*"):
            return any(name.startswith(self.identity[:-1]) for name in names)
        return self.identity in names


class Rules:
    """Looks callers up in rules, in the order of the file."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self.find = functools.lru_cache(_MAX_KNOWN)(self._find)
        """Maps (names in the certificate, token or "") to the caller or None. If there is a token, it alone decides."""

    def __repr__(self) -> str:
        return f"{len(self._rules)} rules"

    def _find(self, names: tuple[str, ...], token: str) -> Caller | None:
        token_sha256 = digest(token) if token else ""
        return next((rule.caller for rule in self._rules if rule.fits(names, token_sha256)), None)


class TenantsFile(ReloadingFile[Rules]):
    """Is a `Gate` by the rules in a file. Raises ConfigError if the file cannot be read or is malformed."""

    def __init__(self, path: Path, look_every_s: float = LOOK_EVERY_S) -> None:
        super().__init__([path], lambda: Rules(parse(_read(path), str(path))), look_every_s)

    def __call__(self, method: str, names: Sequence[str], token: str) -> Caller:
        """Returns the caller. Raises RefusedError (DENIED)."""
        found = self.current().find(tuple(names), token)
        if found is None:
            asked = "your token" if token else f"a certificate with {listed(names)}"
            raise RefusedError(
                Reason.DENIED, f"no rule of the coordinator's tenants file fits {asked}; add one"
            )
        check_right(found, method)
        return found


def parse(text: bytes, where: str) -> list[Rule]:
    """Parses the rules. Raises ConfigError that names the malformed rule."""
    try:
        listing = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(listing, list):
        raise ConfigError(f"{where} must hold a JSON list of rules")
    return [_rule(given, f"rule {number} of {where}") for number, given in enumerate(listing, 1)]


def _rule(given: Any, where: str) -> Rule:
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise ConfigError(f"{where} must be a JSON object whose values are strings")
    if unknown := given.keys() - _FIELDS:
        raise ConfigError(
            f"{where} has unknown fields {', '.join(sorted(unknown))}; known are {', '.join(sorted(_FIELDS))}"
        )
    tenant, identity, token_sha256 = (given.get(name, "") for name in ("tenant", "identity", "token_sha256"))
    if bool(identity) == bool(token_sha256):
        raise ConfigError(f"{where} needs either identity or token_sha256")
    if token_sha256 and (len(token_sha256) != 64 or set(token_sha256) - _HEX):
        raise ConfigError(
            f"{where}: token_sha256 must be 64 hexadecimal digits; `kvlink certs token` prints them"
        )
    try:
        role = Role(given.get("role", "worker"))
    except ValueError:
        raise ConfigError(f"{where}: role must be worker or observer, not {given['role']!r}") from None
    if tenant != EVERY_TENANT:
        tenant_name(tenant)
    elif role is not Role.OBSERVER:
        raise ConfigError(f"{where}: tenant * is for observers; a worker belongs to one tenant")
    return Rule(Caller(tenant, role), identity, token_sha256)


def _read(path: Path) -> bytes:
    try:
        mode_of(path, "--tenants")
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the tenants file {path}: {error.strerror}") from None
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"{path} has {len(text)} bytes, and at most {_MAX_BYTES} are accepted")
    return text
