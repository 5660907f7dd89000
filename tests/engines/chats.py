# SPDX-License-Identifier: Apache-2.0
"""Chats of several turns, with the answers of one plain server, and two bidirectional servers to have them with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from connectors import PATIENT_LEASE_S, kv_transfer
from pair import Answer, Pair, Tokens, ask, prompt
from servers import STEADY_MALLOC, coordinator, post, running, vllm

MODEL = "llama"
BLOCK_TOKENS = 128
NUM_ANSWER = 150
"""More than a block, so that prefill has not seen at least one full block."""
ANSWER_S = 40
_LARGEST = 2048


@dataclass
class Chat:
    """The prompts of a chat, each of which begins with the last one and its answer, and the right answers."""

    name: str
    num_turns: int
    first_tokens: int = 300
    more_tokens: int = 60
    prompts: list[Tokens] = field(default_factory=list)
    answers: list[Tokens] = field(default_factory=list)

    def learn(self, answer: Callable[[Sequence[int]], Answer]) -> None:
        """Asks for the answers."""
        tokens = prompt(self.name, self.first_tokens)
        for turn in range(self.num_turns):
            given = answer(tokens)
            assert given.tokens is not None, given.body
            self.prompts.append(tokens)
            self.answers.append(given.tokens)
            tokens = [*tokens, *given.tokens, *prompt(f"{self.name}, {turn}", self.more_tokens)]

    def new_tokens(self, turn: int) -> int:
        """Returns the tokens of a turn's prompt that neither server has full blocks of."""
        before = len(self.prompts[turn - 1]) + len(self.answers[turn - 1]) - 1 if turn else 0
        return len(self.prompts[turn]) - before // BLOCK_TOKENS * BLOCK_TOKENS

    def said(self, turn: int) -> list[dict[str, str]]:
        """Returns a turn's prompt as messages."""
        parts = [self.prompts[0]]
        for before, answer, tokens in zip(
            self.prompts, self.answers, self.prompts[1 : turn + 1], strict=False
        ):
            parts += [answer, tokens[len(before) + len(answer) :]]
        return [
            {"role": ("user", "assistant")[index % 2], "content": words(part)}
            for index, part in enumerate(parts)
        ]


def words(tokens: Iterable[int]) -> str:
    """Returns the text of tokens."""
    return " ".join(f"t{token}" for token in tokens)


def pool_flags(num_blocks: int, largest: int = _LARGEST) -> tuple[str, ...]:
    """Returns the flags of a server whose pool has so many blocks. `largest` is the number of tokens of a request."""
    blocks = ("--num-gpu-blocks-override", str(num_blocks), "--max-model-len", str(largest))
    return (*blocks, "--max-num-batched-tokens", "1024")


@contextmanager
def plain() -> Iterator[Callable[[Sequence[int]], Answer]]:
    """Yields what asks a server alone, which has blocks for everything."""
    with running([vllm("plain-turns", MODEL, flags=pool_flags(96))]) as (server,):
        yield lambda tokens: ask(server.url, MODEL, tokens, NUM_ANSWER)


@contextmanager
def bidirectional(
    num_blocks: int,
    env: Mapping[str, str] | None = None,
    largest: int = _LARGEST,
    connector: str = "KVLinkConnector",
    answer_s: int = ANSWER_S,
) -> Iterator[Pair]:
    """Yields two servers whose pools have so many blocks each, with a coordinator for streamed answers."""
    with running([coordinator()] if connector == "KVLinkConnector" else []) as coordinators:
        options: dict[str, Any] = {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": answer_s}
        options["num_threads"] = 1  # those of NIXL spin
        for one in coordinators:
            at = f"127.0.0.1:{one.launch.port}"
            options = {"bidirectional": True, "answer_s": answer_s, "coordinator": at}
        config = kv_transfer(connector, lease_s=PATIENT_LEASE_S, **options)
        launches = [
            vllm(
                f"{role}-turns-{connector}",
                MODEL,
                config,
                pool_flags(num_blocks, largest),
                {**STEADY_MALLOC, **(env or {})},
            )
            for role in ("prefill", "decode")
        ]
        with running(launches) as (prefill, decode):
            pair = Pair(MODEL, connector, prefill, decode, PATIENT_LEASE_S, coordinators)
            try:
                for server in (prefill, decode):
                    assert pair.ask(server, prompt("warm up", 300), 2).status == 200
                yield pair
            finally:
                for server in (pair.prefill, pair.decode):
                    server.close()  # a test may have replaced it


def say(url: str, chat: Chat, turn: int) -> str:
    """Has one turn by the API for chats, and returns the answer's text."""
    body = {
        "model": MODEL,
        "messages": chat.said(turn),
        "max_tokens": NUM_ANSWER,
        "temperature": 0,
        "skip_special_tokens": False,  # t0 is one
    }
    status, answer = post(f"{url}/v1/chat/completions", body)
    assert status == 200, answer
    assert "kv_transfer_params" not in answer or answer["kv_transfer_params"] is None
    return str(answer["choices"][0]["message"]["content"]).strip()


def counted(pair: Pair, metric: str, label: str) -> float:
    """Returns one of prefill's counters with a label."""
    samples: dict[str, Any] = pair.prefill.samples()
    return sum(value for name, value in samples.items() if name.startswith(f"{metric}{{") and label in name)


def computed(pair: Pair) -> float:
    """Returns the tokens of prompts that prefill has computed, as vLLM counts them."""
    return counted(pair, "vllm:prompt_tokens_by_source_total", 'source="local_compute"')


def turns(pair: Pair, result: str) -> float:
    """Returns prefill's count of turns with this result."""
    return counted(pair, "vllm:kvlink_turns_total", f'result="{result}"')
