# SPDX-License-Identifier: Apache-2.0
"""Mutants that no test can find, and bugs that somebody planted from outside."""

from __future__ import annotations

from typing import NamedTuple

_SWAPPED = "kvlink/control/session.py:Session.{}: swapped statements"
_CONTROL, _WORKER, _TRANSFER_PY = "kvlink/control/", "kvlink/worker/", "kvlink/transfer/"
_VLLM = "integrations/vllm/"
_DIRECTORY = "kvlink/coordinator/prefix_directory.py:PrefixDirectory"
_STORE = "kvlink/coordinator/store/"
_ETCD = f"{_STORE}etcd/"
_PLAN, _ENGINE, _STAGING = "csrc/plan/", "csrc/engine/", "csrc/staging/"
_TABLE = "csrc/lease/lease_table.cc:LeaseTable"
EQUIVALENT: dict[str, dict[str, str]] = {
    "lease": {
        f"{_TABLE}::sweep: comparison: num_slots - slot >= kSlotsAtOnce -> (num_slots - slot) > (kSlotsAtOnce)":
            "the last slots are checked one by one, which does the same more slowly",
        "csrc/lease/lease_table.cc:are_zero: constant: 0xffff -> 0xffff + 1":
            "never zero, so all slots are checked one by one, which does the same more slowly",
        f"{_TABLE}::take_settled: skipped branch: word.load(std::memory_order_relaxed) == 0 -> false":
            "0 settles no seat, because nonces are 256 or more; the word is exchanged for nothing",
        f"{_TABLE}::set_ready: comparison: shared.load(std::memory_order_relaxed) < ready -> "
        "(shared.load(std::memory_order_relaxed)) <= (ready)": "the value that stands there is stored again",
        "csrc/lease/soft_leases.cc:SoftLeases::end: swapped statements: ended_.push_back(index); num_live_entries_ -= "
        "lease.entries.size(); -> num_live_entries_ -= lease.entries.size(); ended_.push_back(index);":
            "neither uses what the other changes",
    },
    "plan": {
        f"{_PLAN}op_writer.h:finish: swapped statements: ops_.resize(num_ops_); segments_.resize(num_segments_); -> "
        "segments_.resize(num_segments_); ops_.resize(num_ops_);": "neither uses what the other changes",
        f"{_PLAN}planner.cc:Planner::make: swapped statements: join_values_to_keys(reader); join_values_to_keys(owner);"
        " -> join_values_to_keys(owner); join_values_to_keys(reader);": "each changes its own layout",
        f"{_PLAN}planner.cc:has_repeated: operator: num_blocks / 64 -> (num_blocks) * (64)":
            "the bitmap is larger, and its other words stay 0",
        f"{_PLAN}planner.cc:has_repeated: constant: 1 -> 1 + 1 #1": "the bitmap has one word more, which stays 0",
        f"{_PLAN}layout_check.cc:rows_touch: exchanged arguments: std::clamp(below, -last, last) -> "
        "std::clamp(-last, below, last)": "both are min(max(below, -last), last)",
    },
    "stores": {
        f"{_ETCD}history.py:History.__init__: constant: 0 -> 1 #2":
            "etcd's first revision is 1, so that no answer is below it either",
        f"{_ETCD}mirror.py:Mirror._known_keys: skipped branch: request.claimed_revision -> True":
            "the deletion of a record that is not there sets what is None to None, and leaves a timer that is not set",
        f"{_ETCD}sync.py:Sync._start_over: swapped statements: self._revision, self._last = (0, []) -> "
        "ahead of self._history.clear()": "neither uses what the other changes",
        f"{_ETCD}mirror.py:Mirror.expire: swapped statements: self.num_expired += 1 -> "
        "ahead of self._end(name, refusals.expired(ticket.offer))": "neither uses what the other changes",
        f"{_STORE}pending_offers.py:PendingOffers._drop: swapped statements: self._prune(request_id, request) -> "
        "ahead of self._end(request_id, why)": "neither uses what the other changes",
    },
    "engine": {
        f"{_ENGINE}transfer.cc:Transfer::next: constant: 0 -> 0 + 1 #1":
            "twice 1 ns is less than the shortest wait, which is then taken as for 0",
        f"{_ENGINE}pull.cc:Pull::ask: swapped statements: actions_.push_back(action); control_->push(token()); -> "
        "control_->push(token()); actions_.push_back(action);":
            "both are done under the lock under which the control thread takes the actions",
        f"{_ENGINE}engine.cc:Engine::open: swapped statements: std::erase_if(connections_, [](const auto& known) "
        "{ return k~61b75779 -> connections_.push_back(connection); std::erase_if(connection~82ff1239":
            "the new connection is held here, so it has not expired",
        f"{_ENGINE}engine.cc:Engine::open_descriptors: swapped statements: epoll_fd_ = std::move(*epoll); "
        "wake_fd_ = std::move(*wake); -> wake_fd_ = std::move(*wake); epoll_fd_ = std::move(*epoll);":
            "neither uses the other, and no other thread runs yet",
    },
    "session": {
        f"{_SWAPPED.format('__init__')}: self._doubt = asyncio.Event() -> ahead of self._joined.set()":
            "neither event knows the other, and nothing runs between",
        f"{_SWAPPED.format('_rejoin_soon')}: self._doubt.set() -> ahead of self._joined.clear()":
            "those who wait for an event go on when the loop runs again, which is after both",
        f"{_SWAPPED.format('close')}: self._joined.set() -> ahead of self.state = SessionState.CLOSED":
            "those who wait for the event go on when the loop runs again, which is after both",
        f"{_SWAPPED.format('_stay_joined')}: self._joined.clear() -> ahead of self.state = SessionState.REJOINING":
            "nobody looks at either before the loop runs again",
        f"{_SWAPPED.format('__init__')}: self._on_settle = guarded('session settles', on_settle) -> "
        "ahead of self._membership = membership": "neither uses the other",
    },
    "coordinator": {
        "kvlink/coordinator/coordinator.py:Coordinator.__init__: swapped statements: "
        "self.counts = self._server.counts -> ahead of self._prefixes = PrefixService(self._store, limits)":
            "neither uses the other",
        f"{_DIRECTORY}._drop: constant: 0 -> 1": "in an assertion: a copy counts 2,048 bytes or more",
        f"{_DIRECTORY}._enter: swapped statements: self.num_bytes += child.num_copies * _BYTES_OF_PLACE -> "
        "ahead of child.split(common)": "a split leaves the number of copies as it was",
        f"{_DIRECTORY}._remove_part: swapped statements: part = copy.parts.pop(rank, None) -> "
        "ahead of self._leave(copy)": "leaving the tree looks at the servers and the keys, which the part is not among",
    },
    "control": {
        f"{_CONTROL}rpc/feed.py:Feed.close: swapped statements: self._wake.set() -> "
        "ahead of self._closed, self._error = (True, error)":
            "those who wait for the event go on when the loop runs again, which is after both",
        f"{_CONTROL}codec/_cards.py:_check_card: swapped statements: check_within('number of regions', "
        "len(card.region_bytes), 0, limits.MAX_REGIONS) -> ahead of check_within('number of planes', num_planes, 0, "
        "limits.MAX_PLANES)": "what exceeds a bound is refused, and only the words say which was looked at first",
        f"{_CONTROL}codec/_prefixes.py:_check_found: swapped statements: check_within('number of tickets', "
        "len(found.tickets), 1, limits.MAX_RANKS) -> ahead of check_within('num_keys', found.num_keys, 1, "
        "limits.MAX_PREFIX_KEYS)": "what exceeds a bound is refused, and only the words say which was looked at first",
        f"{_CONTROL}rpc/channel.py:_Server.__init__: swapped statements: "
        "self.channel = trust.dial(address, _OPTIONS) -> ahead of self.address = address": "neither uses the other",
    },
    "worker": {
        f"{_WORKER}port_events.py:PortLog.__init__: swapped statements: self._reader = QueueReader(self._log_changes) "
        "-> ahead of self._worker_id = worker_id": "events are read when the loop runs again, which is after both",
        f"{_WORKER}directory.py:ControlDirectory.__init__: swapped statements: self.channels = ChannelClients(dial, "
        "security.keyring is not None) -> ahead of self._coordinator = coordinator": "neither uses the other",
        f"{_WORKER}worker.py:Worker.pull: operator: not isinstance(ticket, Ticket) -> isinstance(ticket, Ticket)":
            "a Ticket passes parsed() unchanged, and Sources parses a text that was not",
        f"{_WORKER}worker.py:Worker._join: constant: 1 -> 2":
            "every epoch above the last one is granted as it is proposed",
        f"{_WORKER}termination.py:Termination.__init__: constant: 1 -> 2":
            "the descriptors are used only after __enter__, which sets them",
    },
    "transfer": {
        f"{_TRANSFER_PY}planners.py:planners: exchanged arguments: common_layers(ours, theirs) -> "
        "common_layers(theirs, ours) #1": "the larger of two beginnings and the smaller of two ends, in either order",
        f"{_TRANSFER_PY}offer_check.py:checked_offer: constant: True -> False":
            "arrays_of and _tokens_of_groups return one for each group, or raise",
        f"{_TRANSFER_PY}axes.py:_measure: constant: True -> False": "the lengths were compared before",
        f"{_TRANSFER_PY}completion.py:LoopWaiter.__init__: swapped statements: loop.add_reader(self._queue.fileno(), "
        "guarded('completions', self._drain)) -> ahead of self._tokens = itertools.count(1)":
            "completions are read when the loop runs again, which is after both",
        f"{_TRANSFER_PY}engine.py:Engine.__init__: swapped statements: self.closed, self._notify_lock = (False, "
        "threading.Lock()) -> ahead of self.channel = OwnChannel()": "neither uses the other",
    },
    "vllm": {
        f"{_VLLM}model/engine_config.py:model_of: swapped statements: draft = getattr(vllm_config.speculative_config, "
        "'draft_model_config', None) -> ahead of load_format = getattr(vllm_config.load_config, 'load_format', 'auto')":
            "both only read the configuration",
        f"{_VLLM}chats/earlier_turns.py:EarlierTurns.ended: swapped statements: asked = self._asked.pop(request_id, "
        "None) -> ahead of self._turns.pop(request_id, None)": "neither uses what the other changes",
        f"{_VLLM}decode/loads.py:Loads._report: swapped statements: name = printable(load.request_id) -> ahead of "
        "self._stats.turns[_why(error) or reason] += 1": "the name is only spelled",
        f"{_VLLM}chats/turns.py:Turns.__init__: swapped statements: self.lookups = PrefixLookups(peers, self._counts) "
        "if peers is not None else None -> ahead of self.peers = peers": "neither uses the other",
        f"{_VLLM}scheduler.py:SchedulerSide._finished: skipped branch: name != KEY -> True":
            "the handoff that is merged behind them has that key too",
    },
}  # fmt: skip
"""By module and by the mutant's name: a proof that it behaves the same. At most 5 % of a module's sample."""


class Planted(NamedTuple):
    """A text that was replaced. Whole statements, or an expression; in Python, any text."""

    name: str
    module: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    """Paths of Python tests that are tried. For C++ all that reach it are."""


_LEASES, _TRANSFER = "csrc/lease/lease_table.cc", "csrc/engine/transfer.cc"
_OFFERS, _SESSION = "kvlink/coordinator/store/pending_offers.py", "kvlink/control/session.py"
_CLAIMS, _MIRROR = "kvlink/coordinator/store/etcd/claims.py", "kvlink/coordinator/store/etcd/mirror.py"
_MEMBERS = "kvlink/coordinator/store/members.py"
_TEST_OFFERS, _TEST_MEMBERS = (
    (
        "tests/coordinator/test_pending_offers.py",
        "tests/control/store",
        "tests/control/test_refused_offers.py",
    ),
    ("tests/coordinator/test_prefix_directory.py", "tests/control/store"),
)
_TEST_MIRROR, _TEST_REFUSED = (
    ("tests/coordinator/test_pending_offers.py",),
    ("tests/control/test_refused_offers.py",),
)
_READY = "shared.ready.store(ready, std::memory_order_relaxed);"
_NONCE = "shared.nonce.store(seat.nonce, std::memory_order_release);"

PLANTED = (
    Planted("releases whatever anyone names", "stores", _OFFERS,
            "given is None or claim.reader not in given.served or claim.claim_id not in given.claim_ids",
            "given is None",
            _TEST_OFFERS),
    Planted("a claim that is sent again gets nothing", "stores", _OFFERS,
            "return ended.tickets if claim.claim_id and claim.claim_id in ended.claim_ids else None",
            "return None",
            _TEST_OFFERS),
    Planted("one rank of several suffices", "stores", _OFFERS,
            "if request is not None and len(request.ranks) == request.num_ranks:\n            return",
            "if request is not None and request.ranks:\n            return", _TEST_OFFERS),
    Planted("a claim does not compare its tickets' revisions", "stores", _CLAIMS,
            "for each in serving.tickets\n            ),", "for each in ()\n            ),",
            ("tests/control_simulation",)),
    Planted("a second process gets the same epoch", "stores", _MEMBERS, "max(last.epoch + 1, card.epoch)",
            "max(last.epoch, card.epoch)", _TEST_MEMBERS),
    Planted("a dead worker is excused again and again", "stores", _MEMBERS, " or worker_id in self._excused", "",
            _TEST_MEMBERS),
    Planted("an expired ticket is not marked", "stores", _MIRROR, "ticket.expired = True", "pass", _TEST_MIRROR),
    Planted("a claim's record is never due", "stores", _MIRROR,
            "self.due.set((name, RECORD), now + request.claimed.ttl_s + LONGEST_WRITE_S)", "pass", _TEST_MIRROR),
    Planted("offers are sent again with their whole time", "session", _SESSION,
            "offer._replace(ttl_s=due - at)", "offer",
            _TEST_REFUSED),
    Planted("refused offers are not sent again", "session", _SESSION, "refused.add(offer.request_id)", "pass",
            _TEST_REFUSED),
    Planted("a silent coordinator is not avoided", "session", _SESSION, "stream.avoid_server()", "pass",
            ("tests/control/test_session.py",)),
    Planted("settle orders are not pushed", "coordinator", "kvlink/coordinator/coordinator.py",
            "await send(Push(PushKind.SETTLE, order.slot, order.settle_nonce))", "pass",
            ("tests/control/test_session.py",)),
    Planted("an agent that refuses counts as alive", "coordinator", "kvlink/coordinator/incumbents.py",
            "why = str(error)",
            'return ""', ("tests/control/test_duplicates.py",)),
    Planted("prefixes of dead workers stay", "coordinator", "kvlink/coordinator/prefix_service.py",
            "if change.what is Joined.DOWN:", "if False:", ("tests/control/test_prefixes.py",)),
    Planted("the nonce is stored before `ready`", "lease", _LEASES, f"{_READY}\n  {_NONCE}", f"{_NONCE} {_READY}"),
    Planted("only the first seat is renewed", "lease", _LEASES,
            "for (const Seat& seat : lease.seats) {\n    if (seat.open) deadlines_.set(seat.slot, deadline_ns);\n  }",
            "const Seat& seat = lease.seats.front(); if (seat.open) deadlines_.set(seat.slot, deadline_ns);"),
    Planted("a late announcer is not fenced", "lease", _LEASES,
            "if (!is_open(slot)) late_slots_.push_back(slot);", ";"),
    Planted("a slot is free before the sweep", "lease", _LEASES, "ended_slots_.push_back(seat.slot);",
            "free_.push(seat.slot);"),
    Planted("a standstill of the owner ends leases", "lease", _LEASES,
            "if (since > kMostAgeingNs) paused_ns_ += since - kMostAgeingNs;", ";"),
    Planted("one settle ends all seats", "lease", _LEASES,
            "seat.slot == slot || (num_readers > 0 && index >= num_readers)", "true"),
    Planted("a slot read is posted behind the data of one lane of two", "engine", _TRANSFER,
            "ordered && stream_.all_planned() && redo_.empty() && lanes_used_ == 1ull << lane",
            "ordered && stream_.all_planned() && redo_.empty()"),
    Planted("a slot read that overtook the data proves it", "engine", _TRANSFER, "(!all_landed())", "false"),
    Planted("a transfer ends with reads in flight", "engine", _TRANSFER, "stopping_ && in_flight_ == 0 && !done()",
            "stopping_ && !done()"),
    Planted("a dropped read under a look that validates is forgotten", "engine", _TRANSFER,
            "if (phase_ == Phase::kValidate) phase_ = Phase::kRead;", ";"),
)  # fmt: skip
"""24 of 26 that somebody planted. `prove()` without `all_landed()` behaves the same. The fence behind a tombstone is
not here: tests on x86 cannot miss it, and docs/design/simulation.md says which model does."""
