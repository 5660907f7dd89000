# SPDX-License-Identifier: Apache-2.0
"""Detects use in a forked child of objects that its parent created, and of gRPC after the parent used it."""

from __future__ import annotations

import os

from kvlink.errors import ConfigError

ADVICE = "start processes by spawn or forkserver, or fork before the first Worker"


def num_forks() -> int:
    """Returns the number of forks between the process that imported kvlink and this one. It differs in each child."""
    return _num_forks


def check_own(made_at: int, what: str) -> None:
    """Raises ConfigError in a child of the process that created an object.

    `made_at` is the value of `num_forks()` when the object was created, and `what` names it in the error.
    """
    if made_at != _num_forks:
        raise ConfigError(f"{what} was made before a fork and belongs to the parent process; {ADVICE}")


def check_grpc() -> None:
    """Raises ConfigError in a child of a process that used gRPC, where calls would hang for lack of gRPC's threads."""
    if _grpc_used_at not in (None, _num_forks):
        raise ConfigError(
            "this process was forked from one in which kvlink ran, and gRPC does not survive a fork; "
            + ADVICE
        )


def use_grpc() -> None:
    """Records that this process uses gRPC. Call it before any gRPC object is created. Raises as `check_grpc` does."""
    global _grpc_used_at
    check_grpc()
    _grpc_used_at = _num_forks


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


_num_forks = 0
_grpc_used_at: int | None = None
os.register_at_fork(after_in_child=_count_fork)
