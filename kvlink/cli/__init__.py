# SPDX-License-Identifier: Apache-2.0
"""This package is the command line of kvlink. Exit codes are 0 for success, 1 for failed work, 2 for bad usage."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command line and exits. It loads the commands itself, so that Ctrl-C meanwhile is no traceback."""
    try:
        from kvlink.cli.commands import run_line

        run_line(arguments)
    except (KeyboardInterrupt, ImportError) as error:
        if isinstance(error, ImportError) and not isinstance(error.__cause__, KeyboardInterrupt):
            raise  # else Ctrl-C came while a native module was initialized
        sys.exit(130)  # 128 and SIGINT, as shells say
