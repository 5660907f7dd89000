# SPDX-License-Identifier: Apache-2.0
"""The file of a user's token: nobody else can have made it, and nobody else can read it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvlink.control.security import own_file
from kvlink.control.security.host_tokens import OwnToken
from kvlink.errors import ConfigError

UID = os.geteuid()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "kvlink"


def test_it_is_made_for_one_user_alone(place: Path) -> None:
    umask = os.umask(0o777)
    try:
        place.mkdir(mode=0o700)
        place.chmod(0o700)
        file, token = own_file.make([place], UID)
    finally:
        os.umask(umask)
    assert (file, len(token) >= 43) == (place / "token", True)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (place, file)] == [0o700, 0o600]
    assert own_file.tokens([place], UID) == {file: token}
    assert [path.name for path in place.iterdir()] == ["token"], "nothing else is left"


def test_what_is_there_stays(place: Path) -> None:
    made = own_file.make([place], UID)
    assert own_file.make([place], UID) == made
    assert own_file.make([place], UID, "t" * 43) == made


def test_all_who_make_it_at_once_get_the_same(place: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        made = {token for _, token in pool.map(lambda _: own_file.make([place], UID), range(64))}
    assert len(made) == 1


def _linked_folder(place: Path) -> None:
    (place.parent / "elsewhere").mkdir(mode=0o700)
    own_file.make([place.parent / "elsewhere"], UID)
    place.symlink_to(place.parent / "elsewhere")


def _linked_file(place: Path) -> None:
    _linked_folder(place.parent / "link")
    place.mkdir(mode=0o700)
    (place / "token").symlink_to(place.parent / "elsewhere" / "token")


def _fifo(place: Path) -> None:
    place.mkdir(mode=0o700)
    os.mkfifo(place / "token", 0o600)


def _folder_for_all(place: Path) -> None:
    own_file.make([place], UID)
    place.chmod(0o711)


def _file_for_all(place: Path) -> None:
    own_file.make([place], UID)
    (place / "token").chmod(0o640)


def _of_another(place: Path) -> None:
    own_file.make([place], UID)
    os.chown(place / "token", UID + 1, -1)


def _folder_of_another(place: Path) -> None:
    own_file.make([place], UID)
    os.chown(place, UID + 1, -1)


def _empty(place: Path) -> None:
    place.mkdir(mode=0o700)
    (place / "token").touch(0o600)


_root = pytest.mark.skipif(UID != 0, reason="only root gives files away: run as root")


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (_linked_folder, "Not a directory|Too many levels of symbolic links"),
        (_linked_file, "Too many levels of symbolic links"),
        (_fifo, "token is not a file"),
        (_folder_for_all, r"other users can access it \(mode 0711, not 0700\)"),
        (_file_for_all, r"other users can access it \(mode 0640, not 0600\)"),
        pytest.param(_of_another, rf"it belongs to user {UID + 1}, not to {UID}", marks=_root),
        pytest.param(_folder_of_another, rf"it belongs to user {UID + 1}, not to {UID}", marks=_root),
        (_empty, "token holds no token; remove it"),
    ],
)
def test_what_another_could_have_made_or_read_is_not_taken(
    place: Path, prepare: Callable[[Path], None], why: str
) -> None:
    prepare(place)
    assert own_file.tokens([place], UID) == {}
    with pytest.raises(
        ConfigError, match=f"no usable folder for the token .*{place}: ({why}).*KVLINK_TOKEN_FILE"
    ):
        own_file.make([place], UID)
    next_best = place.parent / "next"
    assert own_file.make([place, next_best], UID)[0] == next_best / "token"


def test_a_folder_that_takes_no_file_is_passed_over(place: Path) -> None:
    place.touch()
    missing = place.parent / "missing" / "kvlink"
    with pytest.raises(ConfigError, match=f"{place}: .*{missing}: No such file or directory"):
        own_file.make([place, missing], UID)


def test_folders_do_without_home_and_runtime_folder() -> None:
    nobody_has = 4_000_000
    assert own_file.folders({}, nobody_has) == (
        Path("/run/user/4000000/kvlink"),
        Path("/tmp/kvlink-4000000"),
    )
    given = {"XDG_RUNTIME_DIR": "/run/mine", "HOME": "/home/mine"}
    assert own_file.folders(given, nobody_has)[0] == Path("/run/mine/kvlink")
    assert own_file.folders(given, nobody_has)[-1] == Path("/home/mine/.cache/kvlink")
    assert own_file.folders({"XDG_RUNTIME_DIR": "relative", "HOME": "."}, nobody_has) == own_file.folders(
        {}, nobody_has
    )


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_server_makes_it_and_a_client_only_looks(place: Path) -> None:
    clock = Clock()
    client, server = (OwnToken([place], UID, clock) for _ in range(2))
    assert client.shown() == ""
    assert not place.exists()
    server.prepare()
    clock.now += 1
    assert client.shown() == server.shown() != ""


def test_a_token_that_was_cleaned_away_comes_back_as_it_was(place: Path) -> None:
    clock = Clock()
    server = OwnToken([place], UID, clock)
    server.prepare()
    (token,) = server.known(again=False)
    (place / "token").unlink()
    place.rmdir()
    clock.now += 1
    assert list(server.known(again=True)) == [token]
    assert own_file.tokens([place], UID) == {place / "token": token}


def test_servers_believe_what_later_processes_made_in_a_better_place(tmp_path: Path) -> None:
    clock = Clock()
    better, usual = tmp_path / "better", tmp_path / "usual"
    server = OwnToken([better, usual], UID, clock)
    usual.mkdir(mode=0o700)
    server.prepare()
    (better / "token").rename(usual / "token")
    better.rmdir()
    _, later = own_file.make([better], UID)
    assert later not in server.known(again=True), "it looks once a second"
    clock.now += 1
    assert later in server.known(again=True)
