# SPDX-License-Identifier: Apache-2.0
"""Futures of what there is so much of that a turn of the event loop for each would be most of the work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class EagerFuture(asyncio.Future[T]):
    """A future with a hook for either side, called at once and before any callback."""

    on_answer: Callable[[EagerFuture[T]], None] | None = None
    """Who asked hears of a result or an exception."""
    on_cancel: Callable[[EagerFuture[T]], None] | None = None
    """Who was to answer hears that nobody waits any more."""

    def set_result(self, result: T) -> None:
        """As of every future."""
        asyncio.Future.set_result(self, result)
        if self.on_answer is not None:
            self.on_answer(self)

    def set_exception(self, exception: type | BaseException) -> None:
        """As of every future."""
        super().set_exception(exception)
        if self.on_answer is not None:
            self.on_answer(self)

    def cancel(self, msg: Any = None) -> bool:
        """As of every future."""
        cancelled = super().cancel(msg)
        if cancelled and self.on_cancel is not None:
            self.on_cancel(self)
        return cancelled


def eagerly(work: Coroutine[Any, Any, T]) -> EagerFuture[T]:
    """What `work` brings; to cancel it cancels `work`."""
    answer: EagerFuture[T] = EagerFuture()
    working = asyncio.ensure_future(work)

    def give_up(_: EagerFuture[T]) -> None:
        working.cancel()

    def pass_on(_: asyncio.Future[T]) -> None:
        if answer.done() or working.cancelled():
            answer.cancel()
        elif error := working.exception():
            answer.set_exception(error)
        else:
            answer.set_result(working.result())

    answer.on_cancel = give_up
    working.add_done_callback(pass_on)
    return answer
