# SPDX-License-Identifier: Apache-2.0
"""The fault table of chats: what a client gets in the second turn, with kvlink's connector and with NIXL's.

    python tests/engines/turn_faults.py [--connectors KVLinkConnector,NixlConnector] [--only next,edited]

Both have the same flags and pools of 24 blocks, and decode's answers can be pulled for 60 s. In brackets: how long what
happened between the turns took. Ends with 1 when a client got wrong tokens from kvlink.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from chats import NUM_ANSWER, Chat, bidirectional, computed, plain
from pair import Pair, Tokens, ask, eventually, prompt
from servers import post

_ANSWER_S = 60
_OTHERS = 1900
"""The tokens of a request that needs most of a pool."""
_COUNTED_S = 10.0
_METRICS_TRIES = 3


def nothing(pair: Pair) -> None:
    pass


def evict(pair: Pair) -> None:
    """Other requests need the pool."""
    for part in range(2):
        assert pair.ask(pair.decode, prompt(f"evicting {part}", _OTHERS), 1).status == 200


def wait(pair: Pair) -> None:
    time.sleep(_ANSWER_S + 2)


def reset(pair: Pair) -> None:
    post(f"{pair.decode.url}/reset_prefix_cache", {})


def restart(pair: Pair) -> None:
    pair.decode.kill()
    pair.decode = pair.decode.restarted().wait()


SCENARIOS: dict[str, tuple[str, Callable[[Pair], None]]] = {
    "next": ("the next turn comes", nothing),
    "edited": ("the user edits the first message; the router sends the ticket", nothing),
    "evicted": ("other requests need decode's pool", evict),
    "reset": ("decode's prefix cache is reset", reset),
    "expired": ("the time of the offer is over", wait),
    "restarted": ("decode is restarted", restart),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--connectors", default="KVLinkConnector,NixlConnector")
    parser.add_argument("--only", default=",".join(SCENARIOS), help="scenarios, with commas")
    options = parser.parse_args()
    connectors, names = options.connectors.split(","), options.only.split(",")
    chats = {name: Chat(name, 2, 200) for name in names}
    edited = {
        name: [*prompt("another beginning", 40), *prompt(name, 200)[40:]]
        for name in names
        if name == "edited"
    }
    with plain() as answer:
        for chat in chats.values():
            chat.learn(answer)
        for name, tokens in edited.items():
            edited[name] = [*tokens, *chats[name].prompts[1][len(tokens) :]]
            chats[name].answers[1] = _tokens(answer(edited[name]))
            chats[name].prompts[1] = edited[name]
    output = {connector: play(connector, chats) for connector in connectors}
    print(f"| what happens | {' | '.join(connectors)} |\n|---|{'---|' * len(connectors)}")
    for name in names:
        print(f"| {SCENARIOS[name][0]} | {' | '.join(output[one][name] for one in connectors)} |")
    return any("wrong" in text for text in output.get("KVLinkConnector", {}).values())


def play(connector: str, chats: Mapping[str, Chat]) -> dict[str, str]:
    """Returns what happened by scenario."""
    with bidirectional(24, connector=connector, answer_s=_ANSWER_S) as pair:
        output = {}
        for name, chat in chats.items():
            output[name] = second_turn(pair, chat, SCENARIOS[name][1])
            print(connector, name, output[name], file=sys.stderr, flush=True)
        return output


def second_turn(pair: Pair, chat: Chat, between: Callable[[Pair], None]) -> str:
    """Returns what became of the second turn."""
    asked = "turn 1"
    try:
        ticket = have(pair, chat.prompts[0], {})[1]
        asked = "between the turns"
        began = time.perf_counter()
        between(pair)
        between_s = time.perf_counter() - began
        before = computed_at_last(pair)
        asked = "turn 2"
        tokens, _ = have(pair, chat.prompts[1], ticket or {})
    except TimeoutError:
        return f"no answer within 120 s, {asked}"
    eventually(lambda: computed_at_last(pair) > before, _COUNTED_S)
    kind = "an error" if tokens is None else "right" if tokens == chat.answers[1] else "**wrong tokens**"
    came = computed_at_last(pair) - before
    return f"{kind}; prefill computed {came:.0f} of {len(chat.prompts[1])} ({between_s:.1f} s)"


def computed_at_last(pair: Pair) -> float:
    """Returns what prefill has computed. Its API server may answer late: NIXL's threads spin on the same cores."""
    for _ in range(_METRICS_TRIES):
        with suppress(TimeoutError):
            return computed(pair)
    return computed(pair)


def have(pair: Pair, tokens: Tokens, ticket: Mapping[str, Any]) -> tuple[Tokens | None, Any]:
    """Has one turn as a router does. Returns the answer's tokens and ticket."""
    asked = {**ticket, "do_remote_decode": True, "do_remote_prefill": False}
    prefilled = pair.ask(pair.prefill, tokens, 1, kv_transfer_params=asked)
    if prefilled.status != 200:
        return None, None
    answer = ask(pair.decode.url, pair.model, tokens, NUM_ANSWER, kv_transfer_params=prefilled.handoff)
    return answer.tokens, answer.handoff


def _tokens(answer: Any) -> Tokens:
    assert answer.tokens is not None, answer.body
    return list(answer.tokens)


if __name__ == "__main__":
    raise SystemExit(main())
