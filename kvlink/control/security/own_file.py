# SPDX-License-Identifier: Apache-2.0
"""Finds, checks and creates a token file that only one user of the host can read."""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvlink.errors import ConfigError

_log = logging.getLogger("kvlink.control")

_NAME = "token"
_TOKEN_BYTES = 32
_MOST_BYTES = 256
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # opening a FIFO would block forever
_MAKE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class _Unusable(Exception):
    """The folder or file could have been created by another user, or can be read by one."""


def mode_of(path: Path, setting: str) -> int:
    """Returns the permissions of a file of `setting`. Raises ConfigError if every user can write it, and OSError."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & stat.S_IWOTH:
        raise ConfigError(f"every user of this host can write {path} ({setting}): run chmod o= {path}")
    return mode


def folders(env: Mapping[str, str], uid: int) -> tuple[Path, ...]:
    """Returns the folders that may hold a user's token, best first.

    They are the same for all processes of the user as far as environments allow: a process with XDG_RUNTIME_DIR also
    looks where a process without it writes.
    """
    runtime, cache = Path(env.get("XDG_RUNTIME_DIR", "")), Path(_home(env, uid)) / ".cache"
    found = (
        runtime / "kvlink",
        Path(f"/run/user/{uid}/kvlink"),
        Path(f"/tmp/kvlink-{uid}"),
        cache / "kvlink",
    )
    return tuple(folder for folder in dict.fromkeys(found) if folder.is_absolute())


def tokens(places: Sequence[Path], uid: int) -> dict[Path, str]:
    """Returns all tokens by their file, best first. Tokens that others could have written are left out."""
    found: dict[Path, str] = {}
    for folder in places:
        if (token := _token_in(folder, uid)) is not None:
            found[folder / _NAME] = token
    return found


def make(places: Sequence[Path], uid: int, token: str = "") -> tuple[Path, str]:
    """Writes `token`, or a new one, to the first usable folder. A token that another process wrote there is kept.

    Returns the file and its token. Raises ConfigError that names each folder and why it cannot be used.
    """
    token, refused = token or secrets.token_urlsafe(_TOKEN_BYTES), []
    for folder in places:
        try:
            return folder / _NAME, _made_in(folder, uid, token)
        except (OSError, _Unusable) as error:  # noqa: PERF203
            refused.append(f"{folder}: {error.strerror if isinstance(error, OSError) else error}")
    raise ConfigError(
        "there is no usable folder for the token that processes of this user show each other without TLS "
        f"({'; '.join(refused)}): set XDG_RUNTIME_DIR to a folder of this user, or KVLINK_TOKEN_FILE to a file that "
        "only processes that may read this worker's blocks can read"
    )


def _home(env: Mapping[str, str], uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_dir
    except KeyError:  # containers run as users without a passwd entry
        return env.get("HOME", "")


def _token_in(folder: Path, uid: int) -> str | None:
    try:
        with _opened(folder, uid) as at:
            return _read(at, uid)
    except FileNotFoundError:
        return None
    except (OSError, _Unusable) as error:
        _log.debug("no token is taken from folder=%s error=%s", folder, error)
        return None


def _made_in(folder: Path, uid: int, token: str) -> str:
    if folder.parent.name == ".cache":
        _make_folder(folder.parent)
    _make_folder(folder)
    with _opened(folder, uid) as at:
        return _write(at, uid, token)


def _make_folder(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)


@contextlib.contextmanager
def _opened(folder: Path, uid: int) -> Iterator[int]:
    """Opens and checks a folder. The descriptor stays valid for it even if its name is reused later."""
    at = os.open(folder, _OPEN_FOLDER)
    try:
        _check(os.fstat(at), uid, "0700")
        yield at
    finally:
        os.close(at)


def _check(found: os.stat_result, uid: int, wanted: str) -> None:
    if found.st_uid != uid:
        raise _Unusable(f"it belongs to user {found.st_uid}, not to {uid}")
    if found.st_mode & _OTHERS:
        raise _Unusable(f"other users can access it (mode {stat.S_IMODE(found.st_mode):04o}, not {wanted})")


def _read(at: int, uid: int) -> str:
    file = os.open(_NAME, _OPEN_FILE, dir_fd=at)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise _Unusable(f"{_NAME} is not a file")
        _check(found, uid, "0600")
        token = os.read(file, _MOST_BYTES).decode("ascii", "replace").strip()
    finally:
        os.close(file)
    if len(token) < _TOKEN_BYTES or not token.isprintable():
        raise _Unusable(f"{_NAME} holds no token; remove it")
    return token


def _write(at: int, uid: int, token: str) -> str:
    """Creates the file atomically with its content. Returns its content, which another process may have written."""
    fresh = f".{_NAME}.{secrets.token_hex(8)}"
    file = os.open(fresh, _MAKE_FILE, 0o600, dir_fd=at)
    try:
        with os.fdopen(file, "wb") as out:
            os.fchmod(file, 0o600)  # regardless of the umask
            out.write(token.encode() + b"\n")
        with contextlib.suppress(FileExistsError):
            _publish(at, fresh)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh, dir_fd=at)
    return _read(at, uid)


def _publish(at: int, fresh: str) -> None:
    """Gives the file its name. Raises FileExistsError if another process was faster."""
    try:
        os.link(fresh, _NAME, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        os.rename(fresh, _NAME, src_dir_fd=at, dst_dir_fd=at)
