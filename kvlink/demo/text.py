# SPDX-License-Identifier: Apache-2.0
"""Holds the prompts of the demo. One byte is one token, so lengths in bytes are lengths in tokens."""

from __future__ import annotations

_PAGE = """\
A language model reads a prompt once and writes its answer one token at a time. Reading is bound by
arithmetic: every token of the prompt meets every weight, and thousands of them do so together. Writing is
bound by memory: each new token looks back at all the tokens before it, and at all the weights, to add one
word to the answer. A server that does both on one device lets each job disturb the other. So the two jobs
are split. One group of workers reads prompts, another writes answers, and between them travels what reading
has left behind: for every layer and every token of the prompt, one key and one value.

That state is large. For a model of seventy billion parameters a prompt of a few thousand tokens leaves more
than a gigabyte, and the person who asked is waiting while it moves. It is also paged: the tokens of one
request lie in blocks of sixteen that are scattered over the whole pool, in another order on either side. And
it is borrowed: the moment the reading side believes that the transfer has ended, it gives the same blocks to
the next request. A byte that is copied too late is a byte of somebody else's conversation, and nothing in
the answer will say so, apart from the answer itself. Hence the rule of this demonstration: µs do not count
before every token is equal.
"""

PROMPTS: dict[str, str] = {
    "less than a block": "Once upon a",
    "exactly one block": "Sixteen letters.",
    "one token over": "Seventeen letters",
    "some blocks and a bit": _PAGE.partition("\n\n")[0][:203],
    "a page": _PAGE,
}
"""Prompts by name. They cover a single partial block, a full last block, and a last block of one token."""

NUM_NEW_TOKENS = 32
"""The number of tokens generated per prompt."""

Expected = dict[str, list[int]]
"""The tokens of the single-process run by prompt name."""


def tokenize(text: str) -> list[int]:
    """Returns the UTF-8 bytes as token ids (0…255)."""
    return list(text.encode())
