# SPDX-License-Identifier: Apache-2.0
"""Counts the router's events, in Prometheus format."""

from __future__ import annotations

from collections import Counter

_MEANINGS = {
    "handed_off": "prefill answers with a handoff for decode",
    "followed": "requests that decode answered having followed their prefill while it ran",
    "tickets_kept": "answers with a ticket that was kept for the chat's next turn",
    "tickets_sent": "requests sent to prefill with the ticket of their chat's last answer",
    "not_suited": "requests that one handoff cannot serve; decode computed them alone",
    "without_handoff": "prefill answers without a handoff; decode computed the prompt again",
    "without_prefill": "requests that no prefill server answered; decode computed them alone",
    "passed_through": "requests of all other paths, which a decode server answers alone",
    "prefill_retried": "failures of prefill servers, after which another one was asked or decode alone",
    "decode_retried": "failures of decode servers before an answer began, after which another one was asked, if any",
    "moved": "streamed answers that went on at another decode server because theirs drained",
    "not_moved": "streamed answers that stay at a draining decode server because no other one could copy them",
    "resumed": "streamed answers that broke off and went on at another decode server",
    "lost": "streamed answers that broke off and could not go on",
    "refused": "requests that failed: no server was up, or too many had failed at them to ask another one",
    "own_limit": "requests answered with 503 because this process could not connect to any server",
}


class Counts(Counter[str]):
    """The number of each event since the start, by its name in _MEANINGS."""

    def prometheus(self) -> str:
        """Returns the text of /metrics."""
        lines = []
        for event, meaning in _MEANINGS.items():
            name = f"kvlink_router_{event}_total"
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} counter", f"{name} {self[event]}"]
        return "\n".join(lines) + "\n"
