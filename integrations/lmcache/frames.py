# SPDX-License-Identifier: Apache-2.0
"""Decides what is answered to the frames of one message, whatever they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvlink.errors import ConfigError, KVLinkError


class Reply(Protocol):
    """Answers messages. Raises nothing."""

    def answer(self, message: bytes) -> bytes:
        """Returns the answer to a message of one frame."""

    def refuse(self, error: KVLinkError) -> bytes:
        """Counts what is no message, and returns the answer to it."""


def reply_to(frames: Sequence[bytes], reply: Reply) -> list[bytes] | None:
    """Returns the frames of the answer, or None if the sender cannot be answered.

    A reader's message arrives as the identity of its connection, an empty frame, and the message.
    """
    if len(frames) < 3 or frames[1]:
        reply.refuse(
            ConfigError(f"a message of {len(frames)} frames without an envelope: no reader of kvlink")
        )
        return None
    if len(frames) > 3:
        answer = reply.refuse(ConfigError(f"a message has 1 frame, and not {len(frames) - 2}"))
    else:
        answer = reply.answer(frames[2])
    return [frames[0], frames[1], answer]
