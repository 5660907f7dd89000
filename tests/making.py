# SPDX-License-Identifier: Apache-2.0
"""Makes things for a test, and ends them with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def making(make: Callable[..., T], close: str = "close") -> Iterator[Callable[..., T]]:
    """Yields a function that makes one more. At the end all are closed, by their method `close`, the last one first."""
    with ExitStack() as made:

        def one(*args: Any, **options: Any) -> T:
            new = make(*args, **options)
            made.callback(getattr(new, close))
            return new

        yield one
