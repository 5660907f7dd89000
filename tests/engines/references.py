# SPDX-License-Identifier: Apache-2.0
"""The tokens that a handoff must not change.

Kept in a file that the next run reads: servers start at the first prompt that is not in there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

from connectors import PATIENT_LEASE_S, pair_of
from pair import Answer, Pair, Tokens, ask, eventually, flags
from servers import ENGINES, MODELS, running, vllm

_BY_NIXL = ("deepseek", "qwen3-next")
_COLUMNS_FIRST = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
"""NIXL hands over the state of a convolution only in this order."""
_MOST_HANDOFFS = 6
_COUNTED_S = 10.0

Answering = Callable[[Sequence[int]], Answer]


class References:
    """NUM_NEW greedy tokens after each prompt. `answering` starts what is asked when one is not known yet."""

    def __init__(
        self, model: str, answering: Callable[[], AbstractContextManager[Answering]], kind: str = ""
    ) -> None:
        weights = hashlib.sha256((MODELS / model / "model.safetensors").read_bytes()).hexdigest()[:16]
        self._file = ENGINES / "references" / f"{model}-{weights}{kind}.json"
        self._known: dict[str, Tokens] = json.loads(self._file.read_text()) if self._file.exists() else {}
        self._answering = answering
        self._answer: Answering | None = None
        self._stack = ExitStack()

    def __call__(self, tokens: Sequence[int]) -> Tokens:
        key = hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()
        if key not in self._known:
            if self._answer is None:
                self._answer = self._stack.enter_context(self._answering())
            answer = self._answer(tokens)
            assert answer.tokens is not None, answer.body
            self._known[key] = answer.tokens
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self._known))
        return self._known[key]

    def learn(self, prompts: Iterable[Sequence[int]]) -> None:
        """Has all of them known, and nothing that was asked runs on beside the servers under test."""
        for tokens in prompts:
            self(tokens)
        self.close()

    def close(self) -> None:
        """Ends what was started, which may be asked again. Idempotent."""
        self._answer = None
        self._stack.close()


def references_for(model: str, *, prefix_caching: bool = False) -> References:
    """From one plain server; for MLA and gated delta nets from two with NIXL between them.

    On CPUs vLLM prefills and decodes those in different arithmetic: a server that computed the prompt itself answers
    with other tokens than one that received the very same cache, which decodes the prompt's last token. With
    `prefix_caching` of a hybrid model, prefill ends its chunks elsewhere, which is other arithmetic again.
    """
    if prefix_caching:
        return References(model, partial(_two_with_nixl, model, prefix_caching=True), "-cached")
    return References(model, partial(_two_with_nixl if model in _BY_NIXL else _one_alone, model))


@contextmanager
def _one_alone(model: str) -> Iterator[Answering]:
    with running([vllm("plain", model, flags=flags(model))]) as (server,):
        yield lambda tokens: ask(server.url, model, tokens)


@contextmanager
def _two_with_nixl(model: str, prefix_caching: bool | None = None) -> Iterator[Answering]:
    # Nothing may expire: NIXL would answer with the tokens of other blocks. Its four threads a server, unless told
    # otherwise, spin: two CPUs then do not always answer its handshake in the 5 s that it waits.
    with pair_of(
        "NixlConnector",
        model,
        lease_s=PATIENT_LEASE_S,
        env=_COLUMNS_FIRST,
        prefix_caching=prefix_caching,
        num_threads=1,
    ) as pair:
        yield lambda tokens: _said_twice(pair, tokens)


def _said_twice(pair: Pair, tokens: Sequence[int]) -> Answer:
    """Two handoffs in a row that agree: on a busy machine one of NIXL's gave other tokens."""
    output: list[Answer] = []
    for _ in range(_MOST_HANDOFFS):
        answer = _handed_off(pair, tokens)
        if answer is None:
            continue
        output.append(answer)
        if len(output) > 1 and output[-1].tokens == output[-2].tokens:
            return answer
    raise AssertionError(f"no two of {_MOST_HANDOFFS} handoffs in a row gave the same: {output}")


def _handed_off(pair: Pair, tokens: Sequence[int]) -> Answer | None:
    """Every byte of it. None: decode has computed the prompt, as when NIXL's handshake is not answered in its 5 s, or
    one of the servers has not answered within the client's patience, as one of many did not."""
    try:
        pair.forget()
        loads = pair.loads()
        answer = pair.continued(tokens, pair.hand_off(tokens))
        return answer if eventually(lambda: pair.loads() > loads, _COUNTED_S) else None
    except TimeoutError:
        return None
