# SPDX-License-Identifier: Apache-2.0
"""A new user's machine: a minimal Debian in a root of its own. Its pip has no constraints and no wheel of kvlink."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOME = {"root": "/root", "reader": "/home/reader"}
_BASE = ROOT / "build" / "newcomer" / "bookworm"
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
"""The authorities that this machine trusts: the new one has to reach the same indexes of packages."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENTER = """
mount -t overlay -o lowerdir={base},upperdir={folder}/upper,workdir={folder}/work overlay {folder}/root
cd {folder}/root
mount -t proc proc proc
mount -t sysfs sysfs sys
mount --rbind /dev dev
printf '127.0.0.1 localhost\n::1 localhost\n' >etc/hosts
mount -t tmpfs tmpfs tmp
mount -t tmpfs tmpfs run
chmod 1777 tmp
{network}
exec chroot . setpriv --reuid {uid} --regid {uid} --clear-groups env -i {env} bash -euo pipefail -c {command}
"""


class FreshRoot:
    """Runs shell commands as root or as an ordinary user. What they change below / stays until `close`."""

    def __init__(self, folder: Path) -> None:
        missing = [name for name in ("unshare", "setpriv", "debootstrap", "git") if not shutil.which(name)]
        if os.geteuid() != 0 or missing:
            pytest.skip(
                f"needs root and debootstrap (missing: {', '.join(missing)}): sudo make test-newcomer"
            )
        self._folder = folder
        for made in ("upper", "work", "root"):
            (folder / made).mkdir(parents=True)
        if not _BASE.exists():
            _make_base()
        self.run("useradd --create-home --uid 1000 reader", "root")

    def give(self, *paths: str, into: str = "/home/reader/kvlink", owner: str = "reader") -> None:
        """Copies files and folders of the working tree, without what git ignores, to the same places below `into`."""
        listed = _do("git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", *paths).splitlines()
        for name in filter(lambda name: (ROOT / name).is_file(), listed):
            self.put(ROOT / name, str(Path(into, name).parent))
        self.run(f"chown -R {owner}:{owner} {into}", "root")

    def clone(self, into: str, owner: str = "reader") -> None:
        """Makes a checkout of the working tree, with what is not committed, and one commit of history."""
        with tempfile.TemporaryDirectory() as place:
            _do("git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", place)
            shutil.copytree(f"{place}/.git", self._folder / "upper" / into.lstrip("/") / ".git")
        self.give(".", into=into, owner=owner)

    def put(self, file: Path, into: str) -> str:
        """Copies a file of this machine, and returns where it is."""
        target = self._folder / "upper" / into.lstrip("/") / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
        return f"{into}/{file.name}"

    def take(self, path: str) -> Path:
        """Returns a folder that a command has made."""
        return self._folder / "upper" / path.lstrip("/")

    def run(
        self, command: str, user: str = "reader", folder: str = "", network: bool = False, **env: str
    ) -> str:
        """Runs lines of a page as they stand. Asserts that they succeed, and returns stdout."""
        done = self.try_run(command, user, folder, network, **env)
        assert done.returncode == 0, f"$ {command}\n{done.stdout[-3_000:]}\n{done.stderr[-3_000:]}"
        return done.stdout

    def try_run(
        self, command: str, user: str = "reader", folder: str = "", network: bool = False, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """As `run`, whatever the exit status."""
        given = {"HOME": HOME[user], "PATH": f"{HOME[user]}/venv/bin:{_PATH}", "LANG": "C.UTF-8"}
        given |= {"PIP_CERT": _CERTIFICATES} | env
        script = _ENTER.format(
            base=_BASE,
            folder=self._folder,
            network="cp --remove-destination /etc/resolv.conf etc/resolv.conf"
            if network
            else "ip link set lo up",
            uid=0 if user == "root" else 1000,
            env=" ".join(shlex.quote(f"{name}={value}") for name, value in given.items()),
            command=shlex.quote(f"cd {folder or HOME[user]}\n{command}"),
        )
        spaces = ["--mount", "--pid", "--fork", "--kill-child", *([] if network else ["--net"])]
        return subprocess.run(
            ["unshare", *spaces, "--propagation=private", "bash", "-euc", script],
            capture_output=True,
            text=True,
        )

    def close(self) -> None:
        """Deletes what the commands have made, which are gigabytes."""
        shutil.rmtree(self._folder)


def cpu_build_of_torch(machine: FreshRoot, into: str) -> dict[str, str]:
    """Copies it there, as install.md advises, and returns pip's variable for it. {} if this machine has none."""
    found = [
        wheel
        for shelf in os.environ.get("PIP_FIND_LINKS", "").split()
        for wheel in Path(shelf).glob("torch-*")
    ]
    return {"PIP_FIND_LINKS": into} if [machine.put(wheel, into) for wheel in found] else {}


def _make_base() -> None:
    """Takes half a minute, once."""
    _BASE.parent.mkdir(parents=True, exist_ok=True)
    made = _BASE.with_name(f"made-{os.getpid()}")
    _do("debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", str(made))
    shutil.copy(_CERTIFICATES, made / _CERTIFICATES.lstrip("/"))
    made.rename(_BASE)


def _do(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stderr[-2_000:]}"
    return done.stdout
