# SPDX-License-Identifier: Apache-2.0
"""What a forked child may not use: what its parent made, and gRPC once the parent used it."""

from __future__ import annotations

import os

from kvlink.errors import ConfigError

ADVICE = "start processes by spawn or forkserver, or fork before the first Worker"


def num_forks() -> int:
    """How many forks lie between this process and the one that imported kvlink: another number in each child."""
    return _num_forks


def check_own(made_at: int, what: str) -> None:
    """`made_at`: what `num_forks` was then. Raises ConfigError in a child of the process that made it."""
    if made_at != _num_forks:
        raise ConfigError(f"{what} was made before a fork and is the parent process's; {ADVICE}")


def check_grpc() -> None:
    """Raises ConfigError in a child of a process that used gRPC, whose threads are not there: calls would hang."""
    if _grpc_used_at not in (None, _num_forks):
        raise ConfigError(
            "this process was forked from one in which kvlink ran, and gRPC does not survive a fork; "
            + ADVICE
        )


def use_grpc() -> None:
    """Before anything of gRPC is made. Raises as `check_grpc`."""
    global _grpc_used_at
    check_grpc()
    _grpc_used_at = _num_forks


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


_num_forks = 0
_grpc_used_at: int | None = None
os.register_at_fork(after_in_child=_count_fork)
