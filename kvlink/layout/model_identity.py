# SPDX-License-Identifier: Apache-2.0
"""Compares the models of two caches by 8 bytes, which are in each ticket, and says in words how they differ.

A layout's `model` is an identity if it begins with `model-id=` and 16 hexadecimal digits. Words of the form
`field=value` follow, and say what the digits stand for. Any other text is free text, which is compared as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvlink.errors import ConfigError, LayoutMismatch

_IDENTITY = re.compile(r"model-id=([0-9a-f]{16})(?: |$)")
_MOST_SHOWN, _MOST_FIELDS = 200, 3
_NOT_COMPARED = ("model-id", "name", "declared-from")


def identity_text(digits: str, fields: Mapping[str, str]) -> str:
    """Returns the text of an identity. Fields must have no blanks in their names and values."""
    return " ".join([f"model-id={digits}", *(f"{name}={value}" for name, value in fields.items())])


def model_id(text: str) -> int:
    """Returns the 8 bytes of an identity as a number, or 0 for free text."""
    found = _IDENTITY.match(text)
    return int(found[1], 16) if found else 0


def model_labels(text: str) -> dict[str, str]:
    """Returns what metrics and tables show: the digits, the name, and the digits that an operator declared equal."""
    fields = _fields(text)
    return {
        "model_id": fields.get("model-id", ""),
        "name": fields.get("name", "") if fields else text[:_MOST_SHOWN],
        "declared_from": fields.get("declared-from", ""),
    }


def model_difference(ours: str, theirs: str) -> str:
    """Names the first fields in which two identities differ, with both values."""
    here, there = _fields(ours), _fields(theirs)
    names = dict.fromkeys([*here, *there]) if here and there else {}
    found = [
        f"{name} is {values[0]:.{_MOST_SHOWN}} here, and {values[1]:.{_MOST_SHOWN}} there"
        for name in names
        if name not in _NOT_COMPARED
        and len(set(values := (here.get(name, "absent"), there.get(name, "absent")))) > 1
    ]
    if found:
        return "; ".join(found[:_MOST_FIELDS])
    return f"the model here is {ours or 'not named'!r:.{_MOST_SHOWN}}, there {theirs or 'not named'!r:.{_MOST_SHOWN}}"


class PoolModel:
    """The model whose cache a pool has now. Readers compare `number` with each ticket; 0 compares nothing.

    An engine may load other weights while it runs. Any thread may read.
    """

    __slots__ = ("number", "text")

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.number = model_id(text)

    def change(self, text: str) -> None:
        """Replaces the identity. Raises ConfigError for free text, before or after, which no ticket carries."""
        if not (self.number and model_id(text)):
            raise ConfigError(
                f"a model changes from one identity, which begins with model-id=, to another, not from "
                f"{self.text!r:.80} to {text!r:.80}"
            )
        self.text, self.number = text, model_id(text)

    def refuse(self, number: int, worker_id: str, its_card: str) -> LayoutMismatch:
        """Returns the error for a ticket with another number. `its_card` is the text in the card of its worker."""
        if model_id(its_card) == number or not number:
            why = model_difference(self.text, its_card)
        else:
            why = f"its weights were changed after it joined as {its_card:.{_MOST_SHOWN}}"
        return LayoutMismatch(
            f"{worker_id} has the cache of another model: model-id is {self.number:016x} here, and "
            f"{f'{number:016x}' if number else 'absent'} there; {why}. Compute the prompt here, and start both servers "
            "with the same model"
        )


def _fields(text: str) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in text.split(" ")) if model_id(text) else {}
