# SPDX-License-Identifier: Apache-2.0
"""Defines faults between a prefill and a decode server: each scenario causes one, and says how the client fared."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from pair import Answer, Pair, Tokens, prompt
from references import References
from servers import Server

LENGTH = 700  # five blocks and a bit
_TELLING = re.compile(r"fail|expir|refus|stale|reject|after_expiry")


@dataclass(frozen=True)
class Outcome:
    """How one request ended. `right` is None when there were no tokens; `noticed` names metrics that moved."""

    status: int
    right: bool | None
    noticed: tuple[str, ...] = ()

    @property
    def safe(self) -> bool:
        """The right tokens, or an honest error."""
        return bool(self.right) if self.status == 200 else self.status >= 500

    def __str__(self) -> str:
        tokens = {True: "right tokens", False: "WRONG TOKENS", None: "no tokens"}[self.right]
        return f"HTTP {self.status}, {tokens}"


Scenario = Callable[[Pair, References], Answer]
SCENARIOS: dict[str, Scenario] = {}


def _scenario(act: Scenario) -> Scenario:
    SCENARIOS[act.__name__] = act
    return act


@_scenario
def reuse(pair: Pair, references: References) -> Answer:
    """A handoff is used twice; in between, prefill's blocks were given to others."""
    tokens = prompt("reuse", LENGTH)
    handoff = pair.hand_off(tokens)
    assert pair.continued(tokens, handoff).tokens == references(tokens)
    pair.overwrite(pair.prefill, "reuse")
    pair.forget()
    return pair.continued(tokens, handoff)


@_scenario
def expire(pair: Pair, references: References) -> Answer:
    """Decode comes after the lease has ended and prefill's blocks were given to others."""
    tokens = prompt("expire", LENGTH)
    handoff = pair.hand_off(tokens)
    time.sleep(pair.lease_s + 2)
    pair.overwrite(pair.prefill, "expire")
    return pair.continued(tokens, handoff)


@_scenario
def swap(pair: Pair, references: References) -> Answer:
    """The router mixes up two requests of one length."""
    tokens, others = prompt("swap", LENGTH), prompt("swapped", LENGTH)
    handoff, other = pair.hand_off(tokens), pair.hand_off(others)
    answer = pair.continued(tokens, other)
    pair.continued(others, handoff)
    return answer


@_scenario
def prefill_killed(pair: Pair, references: References) -> Answer:
    """Prefill dies between its handoff and the pull. It is back on the same address for what follows."""
    tokens = prompt("prefill killed", LENGTH)
    handoff = pair.hand_off(tokens)
    pair.prefill.kill()
    answer = pair.continued(tokens, handoff)
    pair.prefill = pair.prefill.restarted().wait()
    return answer


@_scenario
def prefill_restarted(pair: Pair, references: References) -> Answer:
    """A handoff of the prefill server's former life, whose blocks hold other requests by now."""
    tokens = prompt("prefill restarted", LENGTH)
    handoff = pair.hand_off(tokens)
    pair.prefill.kill()
    pair.prefill = pair.prefill.restarted().wait()
    pair.overwrite(pair.prefill, "restarted")
    return pair.continued(tokens, handoff)


def play(scenario: Scenario, pair: Pair, references: References) -> Outcome:
    """Runs one, on servers whose prefix caches are empty, and checks who noticed."""
    pair.forget()
    before = {name: _alarms(server) for name, server in _sides(pair).items()}
    expected = _expected(scenario, references)
    answer = scenario(pair, references)
    time.sleep(1)  # metrics of the last step
    noticed = tuple(
        f"{name}: {alarm}"
        for name, server in _sides(pair).items()
        for alarm, value in _alarms(server).items()
        if value > before[name].get(alarm, 0)
    )
    right = None if answer.tokens is None else answer.tokens == expected
    return Outcome(answer.status, right, noticed)


def _expected(scenario: Scenario, references: References) -> Tokens:
    return references(prompt(scenario.__name__.replace("_", " "), LENGTH))


def _sides(pair: Pair) -> dict[str, Server]:
    return {"prefill": pair.prefill, "decode": pair.decode}


def _alarms(server: Server) -> dict[str, float]:
    """Connector metrics that mean trouble, by short name and reason."""
    alarms: dict[str, float] = {}
    for sample, value in server.samples().items():
        name, _, labels = sample.partition("{")
        if re.match(r"vllm:(kvlink|nixl)_", name) and _TELLING.search(name) and not name.endswith("_created"):
            reason = re.search(r'reason="([^"]*)"', labels)
            alarms[name.removeprefix("vllm:") + (f" ({reason[1]})" if reason else "")] = value
    return alarms
