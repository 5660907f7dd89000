# SPDX-License-Identifier: Apache-2.0
"""Two hundred requests move while they generate, and one of the processes is killed again and again: none is lost.

The test stands for a router: it knows the prompt and the tokens that a request has delivered, and gives them to a
process that lives when the other one died.
"""

from __future__ import annotations

import json
import random
from enum import Enum
from typing import Any

import pytest
import recent_transformers  # noqa: F401
from batching_peer import BatchingProcess, end_all

NUM_MOVES, NUM_KILLS, NUM_PROMPTS, NUM_NEW = 200, 24, 20, 60
_SEED = 34


class Kill(Enum):
    """Which process dies, and when."""

    NOBODY = "nobody"
    SOURCE_AFTER_COPY = "the source, after the copy"
    SOURCE_AFTER_MOVE = "the source, after the move"
    TARGET_AFTER_COPY = "the target, after the copy"
    TARGET_AFTER_SUBMIT = "the target, after the submit"


KILLS = [kill for kill in Kill if kill is not Kill.NOBODY]


class Router:
    """Moves requests from `source` to `target`, which change places after each."""

    def __init__(self) -> None:
        self._numbers = iter(range(10**6))
        self.source, self.target = self._start(), self._start()
        self.num_moved = 0

    def _start(self) -> BatchingProcess:
        return BatchingProcess(f"server-{next(self._numbers)}", config={"timeout_s": 5.0})

    def request(self, prompt: list[int], pauses: random.Random, kill: Kill) -> list[int]:
        """Returns the tokens of a request that moves once."""
        name = f"r{next(self._numbers)}"
        self.source.call("generate_on", prompt=prompt, request_id=name, max_new_tokens=NUM_NEW)
        self.source.call("wait_for_tokens", request_id=name, count=pauses.randrange(1, NUM_NEW // 2))
        prefix = json.loads(self.source.call("share", source=name)) if len(prompt) > 32 else None
        if prefix is not None:
            self.target.call("fetch", prefix=json.dumps(prefix))
        if kill is Kill.SOURCE_AFTER_COPY:
            self._replace("source")
            return self._again(self.target, prompt, [])
        if kill is Kill.TARGET_AFTER_COPY:
            self._replace("target")
        try:
            handoff = self.source.call("move", request_id=name)
        except RuntimeError:  # on a slow machine it has ended by now
            ended: list[int] = self.source.call("tokens", request_id=name)
            return ended
        self.num_moved += 1
        if kill is Kill.SOURCE_AFTER_MOVE:
            self._replace("source")
        self.target.call("submit", handoff=handoff, request_id=f"{name}+", max_new_tokens=NUM_NEW)
        if kill is Kill.TARGET_AFTER_SUBMIT:
            self._replace("target")
            moved = json.loads(handoff)
            delivered = [*moved["prompt"][len(prompt) :], moved["first_token"]]
            return self._again(self.source, prompt, delivered)
        tokens: list[int] = self.target.call("tokens", request_id=f"{name}+")
        self.source, self.target = self.target, self.source
        return tokens

    def _again(self, at: BatchingProcess, prompt: list[int], delivered: list[int]) -> list[int]:
        options: dict[str, Any] = {"max_new_tokens": NUM_NEW - len(delivered)}
        name = f"r{next(self._numbers)}"
        rest: list[int] = at.call("generate", prompt=prompt + delivered, request_id=name, **options)
        return delivered + rest

    def _replace(self, which: str) -> None:
        getattr(self, which).kill()
        setattr(self, which, self._start())

    def close(self) -> None:
        end_all(self.source, self.target)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_request_is_lost_and_no_token_is_wrong() -> None:
    choices = random.Random(_SEED)
    plain = BatchingProcess()
    prompts = [choices.choices(range(256), k=choices.randrange(1, 300)) for _ in range(NUM_PROMPTS)]
    expected = [
        plain.call("generate", prompt=prompt, request_id=f"plain-{number}", max_new_tokens=NUM_NEW)
        for number, prompt in enumerate(prompts)
    ]
    kills = [KILLS[number % len(KILLS)] for number in range(NUM_KILLS)]
    kills += [Kill.NOBODY] * (NUM_MOVES - NUM_KILLS)
    choices.shuffle(kills)
    router = Router()
    wrong = []
    for number, kill in enumerate(kills):
        which = choices.randrange(NUM_PROMPTS)
        tokens = router.request(prompts[which], choices, kill)
        if tokens != expected[which]:
            wrong.append((number, kill.value))
    router.close()
    end_all(plain)
    assert not wrong, f"{len(wrong)} of {NUM_MOVES}: {wrong[:5]}"
    print(f"{router.num_moved} of {NUM_MOVES} requests moved, {NUM_KILLS} processes were killed")
    assert router.num_moved > NUM_MOVES // 2
