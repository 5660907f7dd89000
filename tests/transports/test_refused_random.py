# SPDX-License-Identifier: Apache-2.0
"""A kernel that refuses random numbers costs an offer, not a thread that asks for ever."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# The filter of all threads: getrandom fails with EPERM, all else is allowed.
_SCRIPT = """
import ctypes, struct
import kvlink
from kvlink.errors import ConfigError
from kvlink.layout import Geometry, dense

pool = kvlink.BlockPool.allocate(dense(Geometry(1, 1, 64, 16)))
with kvlink.Worker(pool, "w", transports="tcp") as worker:
    rows = [(0x20, 0, 0, 0), (0x15, 0, 1, 318), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    libc = ctypes.CDLL(None, use_errno=True)
    PR_SET_NO_NEW_PRIVS, SECCOMP, SET_MODE_FILTER, TSYNC = 38, 317, 1, 1
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    filter_of = struct.pack("HxxxxxxQ", len(rows), ctypes.addressof(program))
    assert libc.syscall(SECCOMP, SET_MODE_FILTER, TSYNC, filter_of) == 0, ctypes.get_errno()
    for number in range(40):  # some are drawn ahead
        try:
            worker.offer(str(number), [1])
        except ConfigError as refused:
            print(refused)
            break
"""


@pytest.mark.verify
@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64 system calls")
def test_an_offer_without_random_numbers_is_refused() -> None:
    ended = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "getrandom: Operation not permitted" in ended.stdout
    assert "seccomp" in ended.stdout
