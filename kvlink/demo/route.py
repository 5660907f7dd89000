# SPDX-License-Identifier: Apache-2.0
"""Acts as the router: starts the processes, sends each prompt to prefill, then to decode, and compares the tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from statistics import median_low

from kvlink.coordinator.coordinator import Coordinator
from kvlink.demo.processes import Child, ChildError, Reply, import_once
from kvlink.demo.servers import NUM_NEW_TOKENS, PROMPTS, Options
from kvlink.runtime.background import ControlThread

NUM_TIMED_PULLS = 20
STEPS = len(PROMPTS) + NUM_TIMED_PULLS
_ENDED_S = 10.0
_ROLES = {"numpy": "kvlink.demo.servers", "transformers": "kvlink.integrations.transformers.demo"}

Expected = dict[str, list[int]]
"""The tokens of the single-process run by prompt name."""


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one transport. `bytes`, `p50_us` and `gib_per_s` are of the longest prompt, pulled repeatedly."""

    engine: str = ""
    """The engine that prefilled and decoded."""
    transport: str = ""
    path: str = ""
    """The transport that carried the bytes, as the pull reports it."""
    processes: int = 0
    """2, or 1 if both roles share a process because the transport does not leave it."""
    prompts: int = 0
    tokens: int = 0
    """The number of generated tokens that were compared with the single-process run."""
    bytes: int = 0
    p50_us: float = 0.0
    gib_per_s: float = 0.0
    tokens_equal: bool = False
    error: str = ""
    """Why the row is bad, or ""."""
    explanation: str = ""
    """The `pull.explain()` of the longest prompt."""

    @property
    def good(self) -> bool:
        """Returns whether tokens are equal and nothing else failed."""
        return self.tokens_equal and not self.error


class Cluster:
    """A coordinator in this process, and a prefill, a decode and a reference process. Use it as a context manager."""

    def __init__(self, options: Options = Options()) -> None:  # noqa: B008 - frozen
        self._options = options
        self._opened = ExitStack()
        self._children: list[Child] = []
        self._expected: Expected = {}

    def start(self) -> str:
        """Starts the processes and the single-process run. Returns the coordinator's address. Raises ChildError."""
        roles = _ROLES[self._options.engine]
        import_once("kvlink.demo.servers", roles)
        for name in ("prefill", "decode", "reference"):
            self._children.append(Child(name, self._options.patience))
            self._opened.callback(self._children[-1].close)
        reference = self._children[-1]
        reference.call("reference", "open", kind=f"{roles}:Reference", options=self._options)
        reference.ask("reference", "tokens")
        coordinator = ControlThread("coordinator")
        self._opened.callback(coordinator.close)
        return coordinator.run(Coordinator().start())

    def hosts(self, transport: str) -> tuple[Child, Child]:
        """Returns the processes for prefill and decode. Loopback ends at the process, so one process has both roles."""
        prefill, decode, _ = self._children
        alone = transport.removeprefix("fault+") == "loopback"
        return prefill, prefill if alone else decode

    def expected(self) -> Expected:
        """Returns the tokens of the single-process run, which starts in `start`. Raises ChildError."""
        self._expected = self._expected or self._children[-1].answer("reference tokens")
        return self._expected

    def pids(self) -> list[int]:
        """Returns the process ids of the children."""
        return [child.pid for child in self._children]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


@dataclass(frozen=True, slots=True)
class Route:
    """One transport between the two roles. `step` is called STEPS times, for progress."""

    transport: str
    prefill: Child
    decode: Child
    step: Callable[[], None]
    options: Options = Options()  # noqa: RUF009 - frozen

    def try_out(self, coordinator: str, expected: Callable[[], Expected]) -> Row:
        """Runs the whole demonstration over this transport. A failure becomes the row's error.

        Waits for `expected` before anything is timed.
        """
        try:
            with ExitStack() as stack:
                for role, child in (("prefill", self.prefill), ("decode", self.decode)):
                    child.call(
                        role,
                        "open",
                        kind=f"{_ROLES[self.options.engine]}:{role.title()}",
                        transport=self.transport,
                        coordinator=coordinator,
                        options=self.options,
                    )
                    stack.callback(_close, child, role)
                return self._row(expected)
        except ChildError as error:
            return Row(transport=self.transport, error=str(error))

    def _row(self, expected: Callable[[], Expected]) -> Row:
        replies = {name: self._handoff(name, name, NUM_NEW_TOKENS) for name in PROMPTS}
        problems = [
            f"the bytes for {name!r} differ from those offered" for name in replies if _differs(replies[name])
        ]
        wanted = expected()
        different = [name for name, reply in replies.items() if reply["tokens"] != wanted[name]]
        problems += [f"the tokens for {name!r} differ from the single-process run" for name in different]
        longest = max(PROMPTS, key=lambda name: len(PROMPTS[name]))
        pulls = [self._handoff(f"{longest}, pull {i}", longest, 1) for i in range(NUM_TIMED_PULLS)]
        if num_wrong := sum(map(_differs, pulls)):
            problems.append(f"the bytes differ from those offered in {num_wrong} of {len(pulls)} timed pulls")
        self._check_ends(problems)
        p50_us = median_low(pull["us"] for pull in pulls)
        num_bytes = pulls[0]["bytes"]
        return Row(
            engine=replies[longest]["engine"],
            transport=self.transport,
            path=replies[longest]["path"],
            processes=1 if self.prefill is self.decode else 2,
            prompts=len(PROMPTS),
            tokens=sum(len(reply["tokens"]) for reply in replies.values()),
            bytes=num_bytes,
            p50_us=round(p50_us, 1),
            gib_per_s=round(num_bytes / (1 << 30) / (p50_us * 1e-6), 3),
            tokens_equal=not different,
            error="; ".join(problems),
            explanation=next(pull["explanation"] for pull in reversed(pulls) if pull["us"] == p50_us),
        )

    def _handoff(self, request: str, name: str, num_tokens: int) -> Reply:
        """Serves one request from prompt to tokens. Returns decode's reply with the digest of what prefill offered.

        Every request has its own offer and new blocks.
        """
        offer = self.prefill.call(
            "prefill", "prefill", request_id=f"{request} over {self.transport}", prompt=PROMPTS[name]
        )
        reply = self.decode.call("decode", "decode", handoff=offer["handoff"], num_tokens=num_tokens)
        self.step()
        return {**reply, "offered": offer["digest"]}

    def _check_ends(self, problems: list[str]) -> None:
        ended = self.prefill.call("prefill", "ended", timeout_s=_ENDED_S * self.options.patience)
        if any(ended.values()):
            problems.append(
                f"prefill ended with {ended['unsettled']} unsettled offers and the blocks of {ended['held']} requests"
            )


def _differs(reply: Reply) -> bool:
    return bool(reply["digest"] != reply["offered"])


def _close(child: Child, role: str) -> None:
    with suppress(ChildError):  # the first error is reported already
        child.call(role, "close")
