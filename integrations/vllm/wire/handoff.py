# SPDX-License-Identifier: Apache-2.0
"""Defines what a prefill server sends to a decode server about a request, inside `kv_transfer_params`.

Routers pass the dict on and may turn numbers into floats, so everything of kvlink is text.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlink.config import WorkerConfig
from kvlink.config.addresses import can_be_dialled, split_address
from kvlink.config.addresses import joined as host_and_port
from kvlink.control.security.tickets import TicketKeys, ticket_keys
from kvlink.errors import ConfigError
from kvlink.layout.groups import MAX_GROUPS
from kvlink.runtime.names import MAX_NAME_BYTES
from kvlink.ticket import MAX_BLOCKS, SHARED_SEAT, LeaseSeat, Ticket, check_request_id
from kvlink.ticket.prefix_digests import PrefixDigests
from kvlink.tracing import TraceParent
from kvlink.transfer.group_ids import joined
from kvlink.types import ReadyUnit

from ..model.caches import CacheGroup, TokenUnit

KEY = "kvlink"
_SIGNATURE = "signature"
_MAX_OWNERS = 1024
_DIGEST_BYTES = 16
_MAX_TOKENS = 2**31 - 1
_MAX_EPOCH = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Owner:
    """The kvlink worker of one tensor-parallel rank."""

    worker_id: str
    epoch: int
    agent: str


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The worker of one rank, as it reports to the scheduler's side at the start."""

    owner: Owner
    block_tokens: tuple[int, ...]
    """By cache group, the tokens of vLLM in a block of the pool, or 0 for states."""
    kernel_blocks: tuple[int, ...]
    """By cache group, the number of these blocks in one of the scheduler's."""
    units: tuple[tuple[TokenUnit, ...], ...]
    """By cache group, the `CacheGroup.units`."""
    model: int = 0
    """The 8 bytes of the model's identity, which tickets carry."""
    scope: bytes = b""
    """16 bytes that are equal for servers that may exchange prefixes, see `kvlink.layout.scope`."""
    secret: str = field(default="", repr=False)
    """Proves to coordinators that a call comes from this worker."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """A prefilled request, pinned under one lease that every rank holds at the same seats."""

    request_id: str
    owners: tuple[Owner, ...]
    """The workers by tensor-parallel rank."""
    seats: tuple[LeaseSeat, ...]
    block_ids: tuple[array[int], ...]
    """The block ids of each cache group, from token 0 on. 0 means that a sliding window has no block there.

    A group of states has the block with the state after `num_tokens` tokens.
    """
    block_tokens: tuple[int, ...]
    """By cache group, the tokens in one of these blocks, or 0 for states."""
    num_tokens: int
    prompt: str
    """The `prompt_digest` of the tokens."""
    ttl_s: float
    trace: TraceParent | None = None
    """The span of its offer."""
    digests: PrefixDigests | None = None
    """Those of an answer that decode offers to the next turn."""
    model: int = 0
    """The 8 bytes of the identity of the model that computed it."""

    @property
    def soft(self) -> bool:
        """Whether its lease pins nothing: it is an answer that decode offers to the next turn."""
        return len(self.seats) == 1 and self.seats[0].settle_nonce == SHARED_SEAT

    def tickets(self, caches: Sequence[CacheGroup], *, written: bool = True) -> list[Ticket]:
        """Returns one ticket of each owner, for all blocks. `caches` are the reader's.

        With `written` False, readers follow what the owners report as written.
        """
        lists = [ids for ids, group in zip(self.block_ids, caches, strict=True) for _ in group.units]
        tokens = [
            len(ids) * (size // unit.tokens)
            for ids, size, group in zip(self.block_ids, self.block_tokens, caches, strict=True)
            for unit in group.units
        ]
        alone, num_tokens = len(lists) == 1, max(*tokens, 1)
        blocks = lists[0] if alone else joined(lists)
        are_states = [not group.block_tokens for group in caches for _ in group.units]
        kept = [num_tokens if is_state else held for held, is_state in zip(tokens, are_states, strict=True)]
        groups = ((), ()) if alone else (tuple(map(len, lists)), tuple(kept))
        return [
            self._ticket(rank, blocks, groups, num_tokens, written=written)
            for rank in range(len(self.owners))
        ]

    def _ticket(
        self,
        rank: int,
        blocks: array[int],
        groups: tuple[tuple[int, ...], tuple[int, ...]],
        num_tokens: int,
        *,
        written: bool = True,
    ) -> Ticket:
        """Returns the ticket of one owner. Several groups are followed by tokens, one by blocks.

        `groups` are the numbers of blocks and of tokens of each group, empty for one group.
        """
        owner = self.owners[rank]
        group_sizes, group_tokens = groups
        units = num_tokens if group_sizes else len(blocks)
        ticket = Ticket(
            request_id=self.request_id,
            worker_id=owner.worker_id,
            epoch=owner.epoch,
            agent=owner.agent,
            seats=self.seats,
            block_ids=blocks,
            num_tokens=num_tokens,
            ready=units if written else 0,
            ready_unit=ReadyUnit.TOKENS if group_sizes else ReadyUnit.BLOCKS,
            group_sizes=group_sizes,
            group_tokens=group_tokens,
            rank=rank,
            num_ranks=len(self.owners),
            ttl_s=self.ttl_s,
            trace=self.trace,
            digests=self.digests,
            model=self.model,
        )
        keys = _keys()
        return keys.sign(ticket) if keys else ticket

    def to_params(self) -> dict[str, Any]:
        """Returns the value of KEY in `kv_transfer_params`."""
        return signed(
            {
                "ticket": self._ticket(0, self.block_ids[0], ((), ()), self.num_tokens).to_text(),
                "block_tokens": ",".join(map(str, self.block_tokens)),
                "owners": [[owner.worker_id, str(owner.epoch), owner.agent] for owner in self.owners],
                "groups": [_text_of(blocks) for blocks in self.block_ids[1:]],
                "prompt": self.prompt,
            }
        )

    def to_answer(self, engine_id: str) -> dict[str, Any]:
        """Returns what an answer carries to the router: KEY, and the fields of NixlConnector, which some routers read.

        It says which server is to pull: decode what was prefilled, and prefill what was answered.
        """
        host, _, port = self.owners[0].agent.rpartition(":")
        return {
            "do_remote_prefill": not self.soft,
            "do_remote_decode": self.soft,
            "remote_engine_id": engine_id,
            "remote_request_id": self.request_id,
            "remote_host": host,
            "remote_port": int(port),
            "tp_size": len(self.owners),
            "remote_num_tokens": self.num_tokens,
            KEY: self.to_params(),
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Handoff:
        """Parses what a router passed on. Raises ConfigError for anything that `to_params` cannot have written."""
        try:
            given = params[KEY]
            check_signature(given)
            return _parse(given)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            why = f"{type(error).__name__}: {error!s:.120}"
            raise ConfigError(f"kv_transfer_params carry no handoff of kvlink: {why}") from None


@functools.lru_cache(maxsize=1)
def _keys() -> TicketKeys | None:
    return ticket_keys(WorkerConfig.from_env())


def signed(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters, with a signature if this deployment has KVLINK_TICKET_KEYS."""
    keys = _keys()
    return {**params, _SIGNATURE: keys.mark(_signed(params))} if keys else dict(params)


def _signed(params: Mapping[str, Any]) -> bytes:
    return json.dumps([[name, params[name]] for name in sorted(params.keys() - {_SIGNATURE})]).encode()


def check_signature(given: Mapping[str, Any]) -> None:
    """Raises ConfigError if `signed` has not written the signature, ValueError if it cannot have."""
    keys = _keys()
    if keys and not isinstance(given, Mapping):
        raise ValueError("no object")
    if keys and not keys.marked(_signed(given), _text(given.get(_SIGNATURE, ""))):
        raise ConfigError(
            f"kv_transfer_params are not signed by {keys.name}: they were changed or forged, or come from a server "
            f"with {keys.advice}"
        )


def prompt_digest(tokens: Sequence[int], features: Sequence[str] = ()) -> str:
    """Binds a handoff to its prompt: token ids, and names of other inputs of the cache (images, adapters)."""
    digest = hashlib.blake2b(array("q", tokens).tobytes(), digest_size=_DIGEST_BYTES)
    for feature in features:
        digest.update(b"\0" + feature.encode())
    return digest.hexdigest()


def expanded(blocks: Sequence[int], ratio: int) -> array[int]:
    """Returns the scheduler's block ids for a layout whose blocks are `ratio` times smaller. 0 stays "no block"."""
    if ratio == 1:
        return array("I", blocks)
    return array("I", (block * ratio + part if block else 0 for block in blocks for part in range(ratio)))


def _text_of(blocks: array[int]) -> str:
    # Both ends are little-endian, as CUDA and x86 are.
    return base64.b64encode(blocks.tobytes()).decode()


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{type(value).__name__} in place of text")
    return value


def _list(value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"not a list of at most {most}")
    return value


def _owner(value: Any) -> Owner:
    worker_id, epoch, agent = map(_text, _list(value, 3))
    owner = Owner(worker_id, int(epoch), agent)
    if not _is_worker(worker_id) or not 0 <= owner.epoch <= _MAX_EPOCH:
        raise ValueError("an owner that no worker can be")
    if not _is_address(agent):
        raise ValueError("an owner at an address that cannot be dialled")
    return owner


def _is_worker(name: str) -> bool:
    return name.isprintable() and 0 < len(name.encode()) <= MAX_NAME_BYTES


def _is_address(agent: str) -> bool:
    try:
        host, port = split_address(agent)
    except ConfigError:
        return False
    return len(agent) <= MAX_NAME_BYTES and host_and_port(host, port) == agent and can_be_dialled(host)


def _blocks_of(text: str) -> array[int]:
    if len(text) > MAX_BLOCKS * 6:
        raise ValueError("too many blocks")
    blocks = array("I")
    blocks.frombytes(base64.b64decode(text, validate=True))
    return blocks


def _sizes(text: str, block_ids: Sequence[array[int]], num_tokens: int) -> tuple[int, ...]:
    """Returns the tokens in a block of each group, whose blocks hold at most 2^31 - 1 tokens. A state is one block."""
    sizes = tuple(map(int, text.split(",", MAX_GROUPS)))
    if len(sizes) != len(block_ids) or not 1 <= num_tokens <= _MAX_TOKENS:
        raise ValueError("not one size of blocks for each group, or an impossible number of tokens")
    for size, ids in zip(sizes, block_ids, strict=True):
        if not 0 <= size <= _MAX_TOKENS or len(ids) * size > _MAX_TOKENS or (size == 0 and len(ids) > 1):
            raise ValueError("blocks of an impossible size")
    return sizes


def _parse(given: Mapping[str, Any]) -> Handoff:
    try:
        first = Ticket.from_text(_text(given["ticket"]))
        check_request_id(first.request_id)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    owners = tuple(map(_owner, _list(given["owners"], _MAX_OWNERS)))
    block_ids = (
        first.block_ids,
        *(_blocks_of(_text(group)) for group in _list(given["groups"], MAX_GROUPS - 1)),
    )
    block_tokens, prompt = (
        _sizes(_text(given["block_tokens"]), block_ids, first.num_tokens),
        _text(given["prompt"]),
    )
    if not owners or len(prompt) != 2 * _DIGEST_BYTES or sum(map(len, block_ids)) > MAX_BLOCKS:
        raise ValueError("no owners, no digest, or too many blocks")
    if not first.request_id.isprintable():  # logs show it
        raise ValueError("a request id that no server writes")
    return Handoff(
        first.request_id, owners, first.seats, block_ids, block_tokens, first.num_tokens, prompt, first.ttl_s,
        first.trace, first.digests, first.model,
    )  # fmt: skip
