# SPDX-License-Identifier: Apache-2.0
"""Handles bearer tokens. The caller has a file with the token, and the server has its digest."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from kvlink.control.security.reloading_file import ReloadingFile
from kvlink.errors import ConfigError

_MAX_CHARS = 4_096
_BEARER = "Bearer "


class TokenFile(ReloadingFile[str]):
    """Holds the current token in a file. Raises ConfigError if there is none."""

    def __init__(self, path: Path) -> None:
        super().__init__([path], functools.partial(_read, path))

    def __repr__(self) -> str:
        """Omits the token."""
        return f"TokenFile({self.path})"

    @property
    def path(self) -> Path:
        """Returns the path of the file."""
        return self._files[0]


@functools.lru_cache(maxsize=64)
def token_file(path: Path) -> TokenFile:
    """Returns one shared TokenFile per file. Raises ConfigError."""
    return TokenFile(path)


def digest(token: str) -> str:
    """Returns the SHA-256 of a token in hexadecimal, as a tenants file holds it."""
    return hashlib.sha256(token.encode()).hexdigest()


def bearer(header: str | bytes) -> str:
    """Returns the token of an `authorization` header, or "" for another scheme."""
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
