# SPDX-License-Identifier: Apache-2.0
"""Describes encoder outputs, and what `ec_transfer_params` carries of each: its shape, its format and a ticket.

A ticket has the name that both servers derive from the item and the format. So a ticket of another item, shape, model
or processor is refused before anything is read, and under KVLINK_TICKET_KEYS the signature covers all of them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from kvlink.errors import ConfigError, LayoutMismatch
from kvlink.layout.model_identity import model_difference, model_id
from kvlink.ticket import Ticket

KEY = "kvlink"
"""The key of kvlink's part in what `ec_transfer_params` has of an item."""


@dataclass(frozen=True, slots=True)
class ItemFormat:
    """The properties that all items of a server share. Two servers must agree on them."""

    name: str
    """A digest of the model's and the processor's configuration."""
    dtype: str
    item_bytes: int
    """The bytes of one number."""
    hidden_size: int
    """The width of an embedding of the language model. Outputs of several layers are a multiple of it."""
    model: str = ""
    """The identity of the model, which `name` covers."""


@dataclass(frozen=True, slots=True)
class Item:
    """The encoder output of one image, video or audio clip: `rows` embeddings of `width` numbers."""

    identifier: str
    rows: int
    width: int
    format: ItemFormat

    @property
    def num_bytes(self) -> int:
        """The size of the output."""
        return self.rows * self.width * self.format.item_bytes

    @property
    def ticket_name(self) -> str:
        """The request id of tickets for this item."""
        described = [self.identifier, self.rows, self.width, self.format.name, self.format.dtype]
        return "encoded-" + hashlib.sha256(json.dumps(described).encode()).hexdigest()

    def to_params(self, ticket: Ticket) -> dict[str, Any]:
        """Returns what the answer of the encoder server carries."""
        return {
            "ticket": ticket.to_text(),
            "rows": self.rows,
            "width": self.width,
            "dtype": self.format.dtype,
            "format": self.format.name,
            "model": self.format.model,
        }


def offered(params: object, identifier: str, rows: int, ours: ItemFormat) -> tuple[Item, Ticket]:
    """Returns the item that untrusted `params` offer, which has `rows` embeddings here, and its ticket.

    Raises ConfigError for anything that `to_params` cannot have written, and LayoutMismatch, naming the field, for an
    item that differs from the one that this server needs.
    """
    if not isinstance(params, dict) or not isinstance(params.get("ticket"), str):
        raise ConfigError("its ec_transfer_params have no ticket of kvlink")
    width = params.get("width")
    if type(width) is not int or not 0 < width < 2**31:
        raise ConfigError(f"its ec_transfer_params have width {width!r:.40}")
    if rows < 1:
        raise LayoutMismatch("the item has no embeddings")
    theirs = params.get("model")
    if isinstance(theirs, str) and model_id(theirs) != model_id(ours.model):
        raise LayoutMismatch(
            f"the encoder server has another model: {model_difference(ours.model, theirs)}; start both with the same"
        )
    for name, mine in (("format", ours.name), ("dtype", ours.dtype), ("rows", rows)):
        if params.get(name) != mine:
            raise LayoutMismatch(
                f"{name} of the encoder output differs: {mine!r} here, {params.get(name)!r:.80} at the encoder "
                "server; both need the same model, dtype and processor settings"
            )
    if width % ours.hidden_size:
        raise LayoutMismatch(
            f"width of the encoder output differs: multiples of {ours.hidden_size} here, {width} at the encoder server"
        )
    item = Item(identifier, rows, width, ours)
    ticket = Ticket.from_text(params["ticket"])
    if ticket.request_id != item.ticket_name or not ticket.soft:
        raise LayoutMismatch("the ticket is one of another item, or of another format")
    return item, ticket
