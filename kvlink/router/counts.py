# SPDX-License-Identifier: Apache-2.0
"""Counts the router's events, in Prometheus format."""

from __future__ import annotations

from collections import Counter
from typing import Literal

Event = Literal[
    "handed_off",
    "followed",
    "tickets_kept",
    "tickets_sent",
    "not_suited",
    "without_handoff",
    "without_prefill",
    "decode_retried",
    "moved",
    "not_moved",
    "resumed",
    "lost",
    "refused",
]
_MEANINGS: dict[Event, str] = {
    "handed_off": "prefill answers with a handoff for decode",
    "followed": "requests that decode answered having followed their prefill while it ran",
    "tickets_kept": "answers with a ticket that was kept for the chat's next turn",
    "tickets_sent": "requests sent to prefill with the ticket of their chat's last answer",
    "not_suited": "requests that one handoff cannot serve; decode computed them alone",
    "without_handoff": "prefill answers without a handoff; decode computed the prompt again",
    "without_prefill": "requests that found no prefill server; decode computed them alone",
    "decode_retried": "requests that a decode server did not begin to answer; the next one was asked",
    "moved": "streamed answers that went on at another decode server because theirs drained",
    "not_moved": "streamed answers that stay at a draining decode server because no other one could copy them",
    "resumed": "streamed answers that broke off and went on at another decode server",
    "lost": "streamed answers that broke off and could not go on",
    "refused": "requests answered with 503 because nobody could take them",
}


class Counts(Counter[Event]):
    """The number of each event since the start."""

    def prometheus(self) -> str:
        """Returns the text of /metrics."""
        lines = []
        for event, meaning in _MEANINGS.items():
            name = f"kvlink_router_{event}_total"
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} counter", f"{name} {self[event]}"]
        return "\n".join(lines) + "\n"
