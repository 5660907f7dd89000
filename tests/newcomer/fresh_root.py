# SPDX-License-Identifier: Apache-2.0
"""The machine of a new user: a minimal Debian in a root of its own, with a checkout in the home of a user."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_BASE = ROOT / "build" / "newcomer" / "bookworm"
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
"""What this machine trusts; the new one has to reach the same indexes of packages."""
_HOME = "/home/reader"
_ENTER = """
mount -t overlay -o lowerdir={base},upperdir={folder}/upper,workdir={folder}/work overlay {folder}/root
cd {folder}/root
mount -t proc proc proc
mount --rbind /dev dev
mount -t tmpfs tmpfs tmp
chmod 1777 tmp
{network}
exec chroot . setpriv --reuid {user} --regid {user} --clear-groups env -i {env} bash -euo pipefail -c {command}
"""


class FreshRoot:
    """Runs shell commands as root or as an ordinary user. What they change stays, below `folder`.

    The only things of the host that it sees are the network, when a command may use it, and its certificates.
    """

    def __init__(self, folder: Path) -> None:
        missing = [name for name in ("unshare", "debootstrap", "git") if not shutil.which(name)]
        if os.geteuid() != 0 or missing:
            pytest.skip(f"needs root{''.join(f' and {name}' for name in missing)}: apt-get install debootstrap")
        self._folder = folder
        for made in ("upper", "work", "root"):
            (folder / made).mkdir(parents=True)
        if not _BASE.exists():
            _make_base()

    def give(self, paths: list[str], into: str = f"{_HOME}/kvlink") -> None:
        """Copies tracked and new files of the working tree below `paths` to the same places below `into`."""
        listed = _do("git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", *paths).splitlines()
        for name in filter(lambda name: (ROOT / name).is_file(), listed):
            target = self._folder / "upper" / into.lstrip("/") / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
        self.run("useradd --create-home --uid 1000 reader 2>/dev/null || true; chown -R 1000:1000 /home/reader", user=0)

    def put(self, file: Path, into: str = _HOME) -> str:
        """Copies a file of this machine, and returns where it is."""
        target = self._folder / "upper" / into.lstrip("/") / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
        return f"{into}/{file.name}"

    def run(
        self, command: str, user: int = 1000, folder: str = "", network: bool = False, timeout_s: float = 1_800
    ) -> subprocess.CompletedProcess[str]:
        """Runs lines of a page as they stand, and asserts that they succeed."""
        done = self.try_run(command, user, folder, network, timeout_s)
        assert done.returncode == 0, f"$ {command}\n{done.stdout[-3_000:]}\n{done.stderr[-3_000:]}"
        return done

    def try_run(
        self, command: str, user: int = 1000, folder: str = "", network: bool = False, timeout_s: float = 1_800
    ) -> subprocess.CompletedProcess[str]:
        """As `run`, whatever the exit status."""
        home = "/root" if user == 0 else _HOME
        env = {
            "HOME": home,
            "PATH": f"{home}/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "PIP_CERT": _CERTIFICATES,
        }
        script = _ENTER.format(
            base=_BASE,
            folder=self._folder,
            network="cp --remove-destination /etc/resolv.conf etc/resolv.conf" if network else "ip link set lo up",
            user=user,
            env=" ".join(shlex.quote(f"{name}={value}") for name, value in env.items()),
            command=shlex.quote(f"cd {folder or home}\n{command}"),
        )
        spaces = ["--mount", "--pid", "--fork", "--kill-child", *([] if network else ["--net"])]
        return subprocess.run(
            ["unshare", *spaces, "--propagation=private", "bash", "-euc", script],
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )


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
