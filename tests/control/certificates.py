# SPDX-License-Identifier: Apache-2.0
"""A certificate authority of a test, and what processes would have from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

from kvlink.control.security import COORDINATOR, Keyring, Security, TlsFiles, tenant_name
from kvlink.control.security.authority import Authority, Pair
from kvlink.control.security.keys import Keys

HOSTS = ("127.0.0.1", "localhost")
_DAY = timedelta(days=1)


class _Unchecked:
    """Holds files that a Keyring would refuse to load, or that went bad since."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def current(self) -> Keys:
        return self._keys


@dataclass
class Pki:
    """Files lie below `folder`."""

    folder: Path
    authority: Authority = field(default_factory=Authority.make)

    def issue(self, names: Sequence[str], expired: bool = False) -> Pair:
        return self.authority.issue(names, _DAY, datetime.now(timezone.utc) - 2 * _DAY if expired else None)

    def files(self, name: str, names: Sequence[str]) -> TlsFiles:
        files = TlsFiles(*(self.folder / f"{name}.{kind}" for kind in ("ca", "pem", "key")))
        write(files, self.authority.pem.cert, self.issue(names))
        return files

    def coordinator(self) -> Security:
        return secured(self.files("coordinator", [COORDINATOR, *HOSTS]))

    def worker(self, tenant: str = "acme") -> Security:
        return secured(self.files(f"worker of {tenant}", [tenant_name(tenant), *HOSTS]))

    def unchecked(
        self, names: Sequence[str], *, says: Sequence[str] = (), expired: bool = False, trusts: bytes = b""
    ) -> Security:
        """`says`: what the process believes to be named."""
        pair = self.issue(names, expired)
        age = -_DAY if expired else _DAY
        ca = trusts or self.authority.pem.cert
        expires_at = (datetime.now(timezone.utc) + age).timestamp()
        return Security(_Unchecked(Keys(ca, *pair, tuple(says or names), expires_at)))  # type: ignore[arg-type]


def write(files: TlsFiles, ca: bytes, pair: Pair) -> None:
    for path, content in zip(files, (ca, pair.cert, pair.key), strict=True):
        path.write_bytes(content)


def secured(files: TlsFiles, token_file: str = "") -> Security:
    """Changes to the files are seen at once."""
    return Security(Keyring(files, look_every_s=0.0), token_file=token_file)
