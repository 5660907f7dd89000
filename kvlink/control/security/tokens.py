# SPDX-License-Identifier: Apache-2.0
"""Bearer tokens: a file at whoever calls, a digest at whoever is called."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from kvlink.control.security.reloading_file import Watched
from kvlink.errors import ConfigError

_MAX_CHARS = 4_096
_BEARER = "Bearer "


class TokenFile(Watched[str]):
    """The token that the file holds now. Raises ConfigError when there is none."""

    def __init__(self, path: Path) -> None:
        super().__init__([path], functools.partial(_read, path))

    def __repr__(self) -> str:
        """Without the secret."""
        return f"TokenFile({self.path})"

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._files[0]


@functools.lru_cache(maxsize=64)
def token_file(path: Path) -> TokenFile:
    """One a process for the same file. Raises ConfigError."""
    return TokenFile(path)


def digest(token: str) -> str:
    """As a tenants file has it."""
    return hashlib.sha256(token.encode()).hexdigest()


def bearer(header: str | bytes) -> str:
    """The token of an `authorization` header; "" for another scheme."""
    text = header if isinstance(header, str) else header.decode("ascii", "replace")
    return text.removeprefix(_BEARER) if text.startswith(_BEARER) and len(text) <= _MAX_CHARS else ""


def _read(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token in {path} (KVLINK_TOKEN_FILE): {error}") from None
    if not 0 < len(token) <= _MAX_CHARS - len(_BEARER) or not token.isprintable():
        raise ConfigError(f"{path} (KVLINK_TOKEN_FILE) holds no token; `kvlink certs token` makes one")
    return token
