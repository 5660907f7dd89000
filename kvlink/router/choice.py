# SPDX-License-Identifier: Apache-2.0
"""Which server is next: in turn, without those that failed lately. No I/O; the caller brings the clock."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

FIRST_BACK_OFF_S = 0.5
MOST_BACK_OFF_S = 10.0


@dataclass(slots=True)
class _State:
    failures: int = 0
    """In a row."""
    away_until_s: float = 0.0


class Ring:
    """Servers of one role, by URL. Not thread-safe."""

    def __init__(self, urls: Iterable[str]) -> None:
        self._states = {url: _State() for url in urls}
        self._turn = 0

    def __repr__(self) -> str:
        states = (f"{url} failed {state.failures}×" for url, state in self._states.items())
        return f"Ring({', '.join(states)})"

    @property
    def urls(self) -> list[str]:
        """All servers, whatever their state."""
        return list(self._states)

    def choose(self, now_s: float, tried: Collection[str] = ()) -> str | None:
        """The next server that is not away and not in `tried`; None when there is none. Takes its turn."""
        urls = self.urls
        for step in range(len(urls)):
            url = urls[(self._turn + step) % len(urls)]
            if url not in tried and self.available(url, now_s):
                self._turn = (self._turn + step + 1) % len(urls)
                return url
        return None

    def available(self, url: str, now_s: float) -> bool:
        """Whether `choose` would take it. A server that failed gets another chance when its back-off ends."""
        return now_s >= self._states[url].away_until_s

    def failed(self, url: str, now_s: float) -> None:
        """A request or a probe found nobody there: it stays away, twice as long each time in a row."""
        state = self._states[url]
        back_off_s = min(FIRST_BACK_OFF_S * 2**state.failures, MOST_BACK_OFF_S)
        state.failures = min(state.failures + 1, 16)
        state.away_until_s = now_s + back_off_s

    def succeeded(self, url: str) -> None:
        """A request or a probe was answered: it is back at once."""
        self._states[url] = _State()
