# SPDX-License-Identifier: Apache-2.0
"""Chooses the next server: in turn, without those that failed recently. Does no I/O; the caller passes the time."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvlink.runtime.backoff import doubled_s

FIRST_BACK_OFF_S = 0.5
MOST_BACK_OFF_S = 10.0


@dataclass(slots=True)
class _State:
    failures: int = 0
    """The number of consecutive failures."""
    away_until_s: float = 0.0
    lost: bool = False
    """Whether nobody listened there, or a probe failed, since it last answered."""
    draining: bool = False
    """Whether it gets no new requests, until it was gone and has come back."""
    began: str = ""
    """When its process began, as it says itself, or ""."""


class Ring:
    """The servers of one role, by URL. Not thread-safe."""

    def __init__(self, urls: Iterable[str]) -> None:
        self.urls = list(dict.fromkeys(urls))
        self._states = {url: _State() for url in self.urls}
        self._turn = 0

    def choose(self, now_s: float, tried: Collection[str] = (), draining: bool = False) -> str | None:
        """Returns the next available server that is not in `tried`, or None. The following call starts after it.

        If none is available, it returns one that was asked, failed and is still there: a request may fail anywhere.
        With `draining`, those that drain are available too.
        """
        urls = self.urls
        turns = [(self._turn + step) % len(urls) for step in range(len(urls))]
        left = [
            turn for turn in turns if urls[turn] not in tried and (draining or not self.draining(urls[turn]))
        ]
        for fits in (lambda state: now_s >= state.away_until_s, lambda state: not state.lost):
            for turn in left:
                if fits(self._states[urls[turn]]):
                    self._turn = (turn + 1) % len(urls)
                    return urls[turn]
        return None

    def available(self, url: str, now_s: float) -> bool:
        """Returns whether `choose` may return it. A failed server becomes available again when its back-off ends."""
        return self.state(url, now_s) == "up"

    def state(self, url: str, now_s: float) -> str:
        """Returns "up", "away" or "draining"."""
        state = self._states[url]
        return "draining" if state.draining else "up" if now_s >= state.away_until_s else "away"

    def answers(self, url: str) -> bool:
        """Returns whether the last request or probe was answered."""
        return self._states[url].failures == 0

    def draining(self, url: str) -> bool:
        """Returns whether `drain` was called and the server has not been replaced since."""
        return self._states[url].draining

    def drain(self, url: str, began: str = "") -> None:
        """Lets `choose` leave the server out until it was replaced: it was gone and then answered, or began later."""
        self._states[url].draining, self._states[url].began = True, began

    def began(self, url: str, when: str) -> None:
        """Records what a server says about when its process began. Another time than before means another process."""
        state = self._states[url]
        state.lost = state.lost or bool(state.began and when and when != state.began)
        state.began = when or state.began

    def is_last(self, url: str, now_s: float) -> bool:
        """Returns whether no other server is available."""
        return not any(self.available(other, now_s) for other in self._states if other != url)

    def resume(self, url: str) -> None:
        """Undoes `drain`."""
        self._states[url].draining = False

    def failed(self, url: str, now_s: float, lost: bool = True) -> None:
        """Records that a request or a probe failed, and with `lost` that the server itself was not there."""
        state = self._states[url]
        state.lost = state.lost or lost
        state.failures += 1
        state.away_until_s = now_s + doubled_s(state.failures, FIRST_BACK_OFF_S, MOST_BACK_OFF_S)

    def succeeded(self, url: str) -> None:
        """Records that a request or a probe was answered, which makes the server available, unless it drains."""
        state = self._states[url]
        self._states[url] = _State(draining=state.draining and not state.lost, began=state.began)
