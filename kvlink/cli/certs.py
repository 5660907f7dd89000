# SPDX-License-Identifier: Apache-2.0
"""Makes a development CA, and the certificates and keys it signs, as files for `kvlink certs`.

Only the owner of a key file can read it. No file is overwritten, except that --renew
replaces certificates.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from kvlink.control.security.authority import Authority, Pair, names_in
from kvlink.control.security.keys import COORDINATOR, tenant_name, tenants_in
from kvlink.control.security.tokens import digest
from kvlink.errors import ConfigError

_SECRET, _PUBLIC = 0o600, 0o644
_TOKEN_BYTES = 32


_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def make(
    folder: Path,
    hosts: Sequence[str],
    tenants: Sequence[str],
    days: float,
    renew: bool,
    as_json: bool = False,
) -> None:
    """Writes the CA, a coordinator's certificate and one for the workers of each tenant, where they are absent.

    `renew` replaces those that exist, of all tenants if none is named, and keeps the hosts that they name. Prints what
    to set, as shell lines or as JSON. Raises ConfigError if nothing is to be made.
    """
    there = _existing(folder)
    tenants = tenants or (renew and [name for name in there if name != "coordinator"]) or ["default"]
    wanted = {"coordinator": COORDINATOR} | {tenant: tenant_name(tenant) for tenant in tenants}
    if len(wanted) <= len(set(tenants)):
        raise ConfigError(
            "a tenant cannot be called coordinator here, because the files would have the same names; "
            "choose another name"
        )
    if not renew and not wanted.keys() - there.keys():
        raise ConfigError(
            f"{folder} already has certificates for {', '.join(wanted)}; pass --renew to replace them, --tenant to "
            "add another tenant, or another --dir"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = _authority(folder, as_json)
    for name, role in wanted.items():
        if name in there and not renew:
            continue
        named = there.get(name, there.get("coordinator", []))
        all_hosts = list(dict.fromkeys([*_LOOPBACK, *named, *hosts]))
        pair = authority.issue([role, *all_hosts], timedelta(days=days))
        cert, key = _files(folder, name)
        _replace(key, pair.key, _SECRET)
        _replace(cert, pair.cert, _PUBLIC)
        _print_settings(folder, name, all_hosts, days, as_json)


def _existing(folder: Path) -> dict[str, list[str]]:
    """Returns the hosts in each certificate of the folder, by the name of the tenant or "coordinator"."""
    found = {}
    for cert in sorted(folder.glob("*.pem")):
        if cert.stem != "ca":
            names = names_in(cert.read_bytes())
            found[cert.stem] = [name for name in names if name != COORDINATOR and not tenants_in([name])]
    return found


def _print_settings(folder: Path, name: str, hosts: Sequence[str], days: float, as_json: bool) -> None:
    cert, key = _files(folder, name)
    settings = {"KVLINK_TLS_CA": folder / "ca.pem", "KVLINK_TLS_CERT": cert, "KVLINK_TLS_KEY": key}
    whose = "the coordinator"
    if name != "coordinator":
        whose = f"workers of tenant {name}"
        settings["KVLINK_TICKET_KEYS"] = _ticket_keys(folder, name)
    environment = {key: str(path.absolute()) for key, path in settings.items()}
    if as_json:
        print(json.dumps({"for": name, "hosts": list(hosts), "days": days, "environment": environment}))
    else:
        exports = " ".join(f"{key}={shlex.quote(path)}" for key, path in environment.items())
        print(f"# for {whose} on {', '.join(hosts)}, good for {days:g} days\nexport {exports}")


def make_token(path: Path, tenant: str) -> None:
    """Writes a new token and prints the rule for the coordinator's tenants file.

    Raises ConfigError if the file exists.
    """
    if tenant != "*":
        tenant_name(tenant)
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    _write(path, token.encode() + b"\n", _SECRET)
    print(json.dumps({"tenant": tenant, "token_sha256": digest(token), "role": "observer"}))


def _ticket_keys(folder: Path, tenant: str) -> Path:
    """Returns the tenant's key file and makes it if absent. Renewal keeps it: all workers of a tenant must share it."""
    path = folder / f"{tenant}.tickets"
    if not path.exists():
        _write(path, secrets.token_urlsafe(_TOKEN_BYTES).encode() + b"\n", _SECRET)
    return path


def _authority(folder: Path, quiet: bool) -> Authority:
    cert, key = _files(folder, "ca")
    if cert.exists() and key.exists():
        return Authority.of(Pair(cert.read_bytes(), key.read_bytes()))
    authority = Authority.make()
    _write(key, authority.pem.key, _SECRET)
    _write(cert, authority.pem.cert, _PUBLIC)
    if not quiet:
        print(f"# made a development CA; keep {key} where no worker can read it")
    return authority


def _files(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.pem", folder / f"{name}.key"


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Replaces the file atomically: a reader sees the old content or the new content."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    _write(fresh, content, mode)
    fresh.replace(path)


def _write(path: Path, content: bytes, mode: int) -> None:
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except FileExistsError:
        raise ConfigError(f"{path} already exists and is not overwritten; move it away first") from None
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; choose a folder that this user can write to"
        ) from None
    with os.fdopen(file, "wb") as out:
        out.write(content)
