# SPDX-License-Identifier: Apache-2.0
"""Acts as the router: sends each prompt to prefill, then to decode, and compares the tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from statistics import median_low

from kvlink.demo.messages import Reply
from kvlink.demo.options import Options
from kvlink.demo.processes import Child, ChildError
from kvlink.demo.table import Row, failed
from kvlink.demo.text import NUM_NEW_TOKENS, PROMPTS, Expected

NUM_TIMED_PULLS = 20
STEPS = len(PROMPTS) + NUM_TIMED_PULLS
_ENDED_S = 10.0
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Route:
    """One transport between the two roles.

    `step` is called STEPS times, for progress.
    """

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
                for name, child in (("prefill", self.prefill), ("decode", self.decode)):
                    role, given = self.options.role(name), self.options.arguments(name)
                    child.call(role, "open", transport=self.transport, coordinator=coordinator, **given)
                    stack.callback(_close, child, role)
                return self._row(expected)
        except ChildError as error:
            return failed(self.transport, str(error))

    def _row(self, expected: Callable[[], Expected]) -> Row:
        replies = {name: self._handoff(name, name, NUM_NEW_TOKENS) for name in PROMPTS}
        problems = [
            f"the bytes for {name!r} differ from those offered" for name in replies if _differs(replies[name])
        ]
        wanted = expected()
        different = [name for name, reply in replies.items() if reply["tokens"] != wanted[name]]
        problems += [f"the tokens for {name!r} differ from the single-process run" for name in different]
        longest = max(PROMPTS, key=lambda name: len(PROMPTS[name]))
        num_bytes, p50_us, explanation = self._measure(longest, problems)
        self._check_ends(problems)
        return Row(
            engine=replies[longest]["engine"],
            transport=self.transport,
            path=replies[longest]["path"],
            processes=1 if self.prefill is self.decode else 2,
            prompts=len(PROMPTS),
            tokens=sum(len(reply["tokens"]) for reply in replies.values()),
            bytes=num_bytes,
            p50_us=round(p50_us, 1),
            gib_per_s=round(num_bytes / _GIB / (p50_us * 1e-6), 3),
            tokens_equal=not different,
            error="; ".join(problems),
            explanation=explanation,
        )

    def _measure(self, name: str, problems: list[str]) -> tuple[int, float, str]:
        """Returns the bytes and the median microseconds of a pull, and the explanation of the median one.

        Every pull has its own offer and new blocks.
        """
        pulls = [self._handoff(f"{name}, pull {i}", name, num_tokens=1) for i in range(NUM_TIMED_PULLS)]
        num_wrong = sum(map(_differs, pulls))
        if num_wrong:
            problems.append(f"the bytes differ from those offered in {num_wrong} of {len(pulls)} timed pulls")
        middle = median_low(pull["us"] for pull in pulls)
        explanation = next(pull["explanation"] for pull in reversed(pulls) if pull["us"] == middle)
        return pulls[0]["bytes"], middle, explanation

    def _handoff(self, request: str, name: str, num_tokens: int) -> Reply:
        """Serves one request from prompt to tokens. Returns decode's reply with the digest of what prefill offered."""
        offer = self.prefill.call(
            self.options.role("prefill"),
            "prefill",
            request_id=f"{request} over {self.transport}",
            prompt=PROMPTS[name],
        )
        reply = self.decode.call(
            self.options.role("decode"), "decode", handoff=offer["handoff"], num_tokens=num_tokens
        )
        self.step()
        return {**reply, "offered": offer["digest"]}

    def _check_ends(self, problems: list[str]) -> None:
        ended = self.prefill.call(
            self.options.role("prefill"), "ended", timeout_s=_ENDED_S * self.options.patience
        )
        if any(ended.values()):
            problems.append(
                f"prefill ended with {ended['unsettled']} unsettled offers and the blocks of {ended['held']} requests"
            )


def _differs(reply: Reply) -> bool:
    return bool(reply["digest"] != reply["offered"])


def _close(child: Child, role: str) -> None:
    with suppress(ChildError):  # the first error is reported already
        child.call(role, "close")
