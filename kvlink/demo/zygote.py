# SPDX-License-Identifier: Apache-2.0
"""The process that the demo's children are forked from, so that one import of torch and transformers serves all.

`python -m kvlink.demo.zygote FD FD…`: the first descriptor leads to the router, each other one becomes a child's.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from kvlink.demo.child import ROLES, role_type, serve
from kvlink.demo.messages import receive, send

_PR_SET_PDEATHSIG = 1
_TICK_S = 0.005


def main() -> None:
    """Entry point. The kernel kills this process with the router, and every child with this process."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the router, which ends its children
    pipes = [Connection(int(fd)) for fd in sys.argv[1:]]
    for role in ROLES:
        role_type(role)
    gc.freeze()  # a collection in a child would write to, and so copy, every page
    router, *others = pipes
    send(router, {"pids": [_fork(pipe, pipes) for pipe in others]})
    for pipe in others:
        pipe.close()
    try:
        while True:
            send(router, {"returncode": _end(**receive(router))})
    except (EOFError, OSError):
        pass


def _fork(own: Connection, pipes: Sequence[Connection]) -> int:
    """The new child's pid. REQUIRES that this process has one thread and has not used gRPC, as imports leave it."""
    pid = os.fork()
    if pid == 0:
        _die_with_parent()
        for pipe in pipes:
            if pipe is not own:
                pipe.close()
        serve(own)
        sys.exit()
    return pid


def _end(pid: int, within_s: float) -> int:
    """Waits for a child to end, kills it when it has not by then, and returns as Popen.returncode does."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_TICK_S)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
