# SPDX-License-Identifier: Apache-2.0
"""Defines the codecs of the directory of prefixes."""

from __future__ import annotations

from kvlink.control import limits
from kvlink.control.codec._bounds import Bounds, Repeated
from kvlink.control.codec._wire import Codec, by_name, check_name, check_within, codec
from kvlink.control.values import (
    KEY_BYTES,
    SCOPE_BYTES,
    FoundPrefix,
    Prefix,
    PrefixChanges,
    PrefixQuery,
)
from kvlink.errors import ConfigError
from kvlink.v1 import prefixes_pb2 as pb

_MOST_TOKENS = 1 << 20


def _check_keys(scope: bytes, tokens_per_key: int, keys: bytes) -> None:
    check_within("bytes of the scope", len(scope), SCOPE_BYTES, SCOPE_BYTES)
    check_within("tokens_per_key", tokens_per_key, 1, _MOST_TOKENS)
    if len(keys) % KEY_BYTES:
        raise ConfigError(f"keys have {KEY_BYTES} bytes each, and these {len(keys)} bytes are no multiple")
    check_within("number of keys", len(keys) // KEY_BYTES, 1, limits.MAX_PREFIX_KEYS)


def _check_prefix(prefix: Prefix) -> None:
    check_name("request_id", prefix.request_id)
    check_within("ttl_s", prefix.ttl_s, 0.001, limits.MAX_TTL_S)
    if not prefix.rank < prefix.num_ranks <= limits.MAX_RANKS:
        raise ConfigError(f"rank {prefix.rank} of {prefix.num_ranks} is out of bounds")
    _check_keys(prefix.scope, prefix.tokens_per_key, prefix.keys)
    check_within("bytes of the ticket", len(prefix.ticket), 1, limits.MAX_PREFIX_TICKET_BYTES)


def _check_changes(changes: PrefixChanges) -> None:
    check_name("worker_id", changes.worker_id)
    check_within("number of prefixes", len(changes.prefixes), 0, limits.MAX_PREFIXES)
    check_within("number of names", len(changes.withdrawn), 0, limits.MAX_BATCH_OPS)
    keys = sum(len(prefix.keys) for prefix in changes.prefixes) // KEY_BYTES
    check_within("number of keys of all prefixes", keys, 0, limits.MAX_PREFIX_KEYS)
    for request_id in changes.withdrawn:
        check_name("request_id", request_id)


def _check_query(query: PrefixQuery) -> None:
    _check_keys(query.scope, query.tokens_per_key, query.keys)
    check_within("most", query.most, 1, limits.MAX_FOUND)
    check_within("number of workers to ask last", len(query.last), 0, limits.MAX_ASKED_LAST)
    for worker_id in query.last + ((query.worker_id,) if query.worker_id else ()):
        check_name("worker_id", worker_id)


def _check_found(found: FoundPrefix) -> None:
    check_within("num_keys", found.num_keys, 1, limits.MAX_PREFIX_KEYS)
    check_within("number of tickets", len(found.tickets), 1, limits.MAX_RANKS)
    if found.worker_ids:
        check_within("number of workers", len(found.worker_ids), len(found.tickets), len(found.tickets))
    for worker_id in found.worker_ids:
        check_name("worker_id", worker_id)


_write_found, _read_found = by_name(FoundPrefix, pb.FoundPrefix, _check_found)

_CHANGES: Bounds = {
    3: Repeated("prefixes", limits.MAX_PREFIXES),
    4: Repeated("names", limits.MAX_BATCH_OPS),
}
_FOUND: Bounds = {
    1: Repeated(
        "servers",
        limits.MAX_FOUND,
        {2: Repeated("tickets", limits.MAX_RANKS), 3: Repeated("workers", limits.MAX_RANKS)},
    )
}
_QUERY: Bounds = {7: Repeated("workers to ask last", limits.MAX_ASKED_LAST)}

PUBLISH = codec(
    pb.PublishPrefixesRequest,
    *by_name(
        PrefixChanges,
        pb.PublishPrefixesRequest,
        _check_changes,
        prefixes=by_name(Prefix, pb.PublishedPrefix, _check_prefix),
    ),
    _CHANGES,
    limits.MAX_BATCH_BYTES,
)
PUBLISHED: Codec[int] = codec(
    pb.PublishPrefixesReply,
    lambda directory_id: pb.PublishPrefixesReply(directory_id=directory_id),
    lambda message: message.directory_id,
)
FIND = codec(pb.FindPrefixRequest, *by_name(PrefixQuery, pb.FindPrefixRequest, _check_query), _QUERY)
FOUND: Codec[list[FoundPrefix]] = codec(
    pb.FindPrefixReply,
    lambda found: pb.FindPrefixReply(found=[_write_found(each) for each in found]),
    lambda message: [_read_found(each) for each in message.found],
    _FOUND,
)
