# SPDX-License-Identifier: Apache-2.0
"""Forks the demo's children from one process, so that one import of numpy, or of torch and transformers, serves all.

`python -m kvlink.demo.zygote ROLE,ROLE… FD FD…`: the first descriptor leads to the router, each other
one becomes a child's.
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

from kvlink.demo.child import role_type, serve
from kvlink.demo.messages import receive, send

_PR_SET_PDEATHSIG = 1
_TICK_S = 0.005


def main() -> None:
    """Runs the zygote. The kernel kills this process with the router, and every child with this process."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the router, which ends its children
    pipes = [Connection(int(fd)) for fd in sys.argv[2:]]
    for role in filter(None, sys.argv[1].split(",")):
        role_type(role)
    gc.freeze()  # a collection in a child would write to every page, and so copy it
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
    """Forks a child and returns its pid.

    Requires that this process has one thread and has not used gRPC, which is the state after the imports.
    """
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
    """Waits for a child to end and kills it at the deadline. Returns its status like Popen.returncode."""
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
