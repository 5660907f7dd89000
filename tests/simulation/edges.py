# SPDX-License-Identifier: Apache-2.0
"""Removes or redirects every edge of a pull, one at a time, and says which tests find it.

Each change is compiled into the unit tests of the engine or the lease table and into the simulation, of which the
gate's 10,000 seeds run. Prints the table of docs/design/simulation.md. To be called after `make test-cpp`:

    python tests/simulation/edges.py [--jobs 2] [part of a name ...]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PULL, TRANSFER = "csrc/engine/pull.cc", "csrc/engine/transfer.cc"
LEASES, LANE, THREAD = "csrc/lease/lease_table.cc", "csrc/engine/lane.cc", "csrc/engine/progress_thread.cc"
UNIT_TESTS = re.compile(r"tests/cpp/engine/(pull|transfer|lane|lane_driver)_test\.cc")
LEASE_TESTS = re.compile(r"tests/cpp/lease/.*\.cc")
FOUND_NOTHING = "-"
PRODUCT, SIMULATION, MODEL = "product", "simulation", "model"


def variant_of(words: Sequence[str]) -> str:
    """Returns which program a compiler's command belongs to."""
    if "-DKVLINK_MEMORY_MODEL" in words:
        return MODEL
    return SIMULATION if "-DKVLINK_SIMULATED_SYNC" in words else PRODUCT


@dataclass(frozen=True)
class Change:
    """One edge, or rule of an edge, that is taken away."""

    edge: str
    what: str
    patches: Sequence[tuple[str, str]]
    file: str = PULL


def cut(edge: str, what: str, old: str, new: str = "", file: str = PULL) -> Change:
    """Returns a change of one place."""
    return Change(edge, what, [(old, new)], file)


_GUARD = "state() != PullState::kWaiting || attempt != attempt_"
_GOES_ON = "stop_ != Stop::kNone || now >= deadline_ns_ || attempt_ + 1 >= num_attempts_"
_MAY_REFUSE = "!another || attempt_ + 1 >= num_attempts_ || now >= deadline_ns_"
_FAILED = "if (ended == PullState::kFailed && relaying_.failed) relaying_.failed();"
_STORE_END = "  state_.store(ended, std::memory_order_release);\n"
_STORE_WAITING = "  state_.store(PullState::kWaiting, std::memory_order_release);\n"
_STORE_READING = "    state_.store(PullState::kReading, std::memory_order_release);\n"
_STORE_STARTING = "    state_.store(PullState::kStarting, std::memory_order_release);\n"

_READY = "  shared.ready.store(ready, std::memory_order_relaxed);\n"
_NONCE = "  shared.nonce.store(seat.nonce, std::memory_order_release);\n"

EDGES: dict[str, tuple[str, str, str]] = {
    # name: from, to, by
    "begin": ("new", "Waiting", "waiting()"),
    "started": ("new", "Reading", "started()"),
    "ended before": ("new", "Valid", "empty(), started() after the end"),
    "connected": ("Waiting", "Starting", "connected()"),
    "started all": ("Starting", "Reading", "all parts have started"),
    "start over": ("Starting", "Waiting", "all connections broke at once"),
    "refused, again": ("Waiting", "Waiting", "refused(), another source"),
    "refused": ("Waiting", "Failed", "refused()"),
    "stopped": ("Waiting", "Failed", "cancel(), close(), tick()"),
    "cut": ("Reading", "Waiting", "transfer_ended(), cut"),
    "settled": ("Reading", "Settled", "transfer_ended(), owners told"),
    "valid": ("Reading", "Valid", "transfer_ended(), valid"),
    "failed": ("Reading", "Failed", "transfer_ended(), failed"),
}
"""The edges in docs/design/pull.md's drawing. An edge from Starting is one from Reading that comes sooner."""

CHANGES: list[Change] = [
    cut(
        "begin",
        "nothing is asked for",
        "&& attempt_ == 0) {\n    ask_to_connect(now_ns());",
        "&& attempt_ == 0) {",
    ),
    cut(
        "begin",
        "what was asked before is not told",
        "if (!actions_.empty()) {\n    control_->push(token());",
        "if (!actions_.empty()) {",
    ),
    cut("begin", "it asks again for what the control thread has taken", " && attempt_ == 0) {", ") {"),
    cut(
        "begin",
        "an action is asked for, and the control thread not told",
        "  actions_.push_back(action);\n  control_->push(token());",
        "  actions_.push_back(action);",
    ),
    cut(
        "begin", "a pull that asks for something may be forgotten", "!done() || !actions_.empty()", "!done()"
    ),
    cut(
        "started",
        "it waits instead",
        "  pull->state_.store(PullState::kReading, std::memory_order_relaxed);\n",
    ),
    cut(
        "started",
        "a transfer that has ended meanwhile is waited for",
        "if (!only->follow(pull, 0)) pull->transfer_ended(0, only->state(), only->status().code());",
        "only->follow(pull, 0);",
    ),
    cut(
        "ended before",
        "an owner that is untold counts as told",
        "state != TransferState::kFailed && told)",
        "state != TransferState::kFailed)",
    ),
    cut(
        "ended before",
        "an empty pull waits",
        "  pull->state_.store(PullState::kValid, std::memory_order_relaxed);\n",
    ),
    cut("connected", "an answer counts in every state", _GUARD + " || reads", "attempt != attempt_ || reads"),
    cut(
        "connected",
        "an answer to every attempt counts",
        _GUARD + " || reads",
        "state() != PullState::kWaiting || reads",
    ),
    cut(
        "connected", "an answer without a part counts", " || reads.empty()) return false;", ") return false;"
    ),
    cut(
        "connected",
        "an answer with other parts counts",
        "    if (wanted_.size() != reads.size()) return false;\n",
    ),
    cut("connected", "it goes on waiting while it starts", _STORE_STARTING),
    cut(
        "connected",
        "it reads already while it starts",
        _STORE_STARTING,
        _STORE_STARTING.replace("kStarting", "kReading"),
    ),
    cut(
        "connected",
        "a part that was cut before counts as failed",
        "    for (const uint32_t index : parts) part(index).state = TransferState::kPending;\n",
    ),
    cut(
        "connected",
        "the source of a relay has all the time",
        "    deadline = until_ns_;\n",
        "    deadline = deadline_ns_;\n",
    ),
    Change(
        "connected",
        "a start under way does not count as alive",
        [
            ("parts.size()) + 1;", "parts.size());"),
            (
                "  std::lock_guard lock(mutex_);\n  if (--alive_ == 0) {\n    conclude();",
                "  std::lock_guard lock(mutex_);\n  if (done() || alive_ == 0) {",
            ),
        ],
    ),
    cut(
        "connected",
        "a part starts after a cancel",
        "  if (is_stopped()) return transfer_ended(index, TransferState::kFailed, Code::kCancelled);\n",
    ),
    cut(
        "connected",
        "a transfer that started during a cancel goes on",
        "  if (is_stopped()) transfer->cancel();\n",
    ),
    cut(
        "connected",
        "a close counts as a cancel while it starts",
        "return stop_ == Stop::kCancelled;",
        "return stop_ != Stop::kNone;",
    ),
    cut(
        "connected",
        "a close takes a cancel back",
        "if (stop_ != Stop::kCancelled) stop_ = why;",
        "stop_ = why;",
    ),
    cut(
        "connected",
        "a connection that is broken at the start is forgotten",
        "if (!transfer) return transfer_ended(index, TransferState::kFailed, Code::kPeerUnreachable);",
        "if (!transfer) return;",
    ),
    cut(
        "connected",
        "a transfer that ends before it is followed is forgotten",
        "  transfer_ended(index, transfer->state(), transfer->status().code());\n}",
        "}",
    ),
    cut("connected", "nobody finds the transfer", "    part(index).transfer = transfer;\n"),
    cut("started all", "it goes on starting", _STORE_READING),
    cut(
        "started all",
        "those who wait do not drive its lanes",
        "    changed_.notify_all();  // those who wait can drive its lanes now\n",
    ),
    cut(
        "start over",
        "nothing follows when all have ended meanwhile",
        "  if (--alive_ == 0) {\n    conclude();\n  } else {",
        "  if (--alive_ != 0) {",
    ),
    cut(
        "start over",
        "those who wait sleep on",
        "return done() || state() != before || (state()",
        "return done() || (state()",
    ),
    cut("refused, again", "there is no other source", _MAY_REFUSE, "true"),
    cut(
        "refused, again",
        "there is always another source",
        _MAY_REFUSE,
        "attempt_ + 1 >= num_attempts_ || now >= deadline_ns_",
    ),
    cut(
        "refused, again",
        "there are more attempts than sources",
        _MAY_REFUSE,
        "!another || now >= deadline_ns_",
    ),
    cut(
        "refused, again",
        "there are attempts after the deadline",
        _MAY_REFUSE,
        "!another || attempt_ + 1 >= num_attempts_",
    ),
    cut(
        "refused, again",
        "the same source is asked for again",
        "  ++attempt_;\n  ask_to_connect(now);\n}\n\n/// Everything",
        "  ask_to_connect(now);\n}\n\n/// Everything",
    ),
    cut(
        "refused, again",
        "nothing is asked for",
        "  ++attempt_;\n  ask_to_connect(now);\n}\n\n/// Everything",
        "  ++attempt_;\n}\n\n/// Everything",
    ),
    cut(
        "refused, again",
        "the first source of a relay has all the time",
        "  if (relaying_.failed) until_ns_ =",
        "  if (false) until_ns_ =",
    ),
    cut("refused", "a refusal counts in every state", _GUARD + ") return;", "attempt != attempt_) return;"),
    cut(
        "refused",
        "a refusal of every attempt counts",
        _GUARD + ") return;",
        "state() != PullState::kWaiting) return;",
    ),
    cut("refused", "it goes on waiting", "return end(std::move(why));", "return;"),
    cut("refused", "it does not say why", "return end(std::move(why));", "return end({});"),
    cut(
        "stopped",
        "a cancelled pull goes on waiting",
        "    if (state() == PullState::kWaiting) {\n      const",
        "    if (state() == PullState::kWaiting && why != Stop::kCancelled) {\n      const",
    ),
    cut(
        "stopped",
        "a closed pull goes on waiting",
        "    if (state() == PullState::kWaiting) {\n      const",
        "    if (state() == PullState::kWaiting && why != Stop::kClosed) {\n      const",
    ),
    cut("stopped", "a pull goes on waiting after its deadline", "stop(Stop::kDeadline);\n}", ";\n}"),
    cut(
        "stopped",
        "the control thread has no time to say why",
        "now >= deadline_ns_ + kAnswerNs) stop",
        "now >= deadline_ns_) stop",
    ),
    cut("stopped", "who waits does not check the deadline", "    tick(now_ns());\n"),
    cut(
        "stopped",
        "who waits sleeps beyond the deadline",
        "  if (before == PullState::kWaiting) until = std::min(until, deadline_ns_ + kAnswerNs);\n",
    ),
    cut("stopped", "the control thread is not told", "      ask({PullAction::Kind::kGiveUp, attempt_});\n"),
    cut(
        "stopped",
        "a pull that has ended is stopped again",
        "    if (done()) return;\n    if (stop_",
        "    if (stop_",
    ),
    cut(
        "cut",
        "nothing is read again",
        "goes_on(now) ? want_again(now) : end(why_not_read());",
        "end(why_not_read());",
    ),
    cut(
        "cut",
        "it is read again after a cancel or a close",
        _GOES_ON,
        "now >= deadline_ns_ || attempt_ + 1 >= num_attempts_",
    ),
    cut(
        "cut",
        "it is read again after the deadline",
        _GOES_ON,
        "stop_ != Stop::kNone || attempt_ + 1 >= num_attempts_",
    ),
    cut(
        "cut",
        "it is read again as often as it is cut",
        _GOES_ON,
        "stop_ != Stop::kNone || now >= deadline_ns_",
    ),
    cut(
        "cut",
        "it is read again whatever the failure",
        "if (!elsewhere) return code == Code::kPeerUnreachable;",
        "if (!elsewhere) return true;",
    ),
    cut(
        "cut",
        "a relay goes on whatever the failure",
        "return code != Code::kConfig && code != Code::kLayoutMismatch && code != Code::kCancelled;",
        "return true;",
    ),
    cut("cut", "a relay goes on only if it was cut", "if (!elsewhere) return", "return"),
    cut(
        "cut",
        "one part that may not be read again does not matter",
        "relaying_.failed != nullptr)) return false;",
        "relaying_.failed != nullptr)) continue;",
    ),
    cut("cut", "it is read again although no part failed", "  return any;\n", "  return true;\n"),
    cut(
        "cut",
        "all parts are read again",
        "    if (part(index).state != TransferState::kFailed) continue;\n    wanted_",
        "    wanted_",
    ),
    cut("cut", "the parts of the attempt before stay wanted", "  wanted_.clear();\n"),
    cut(
        "cut",
        "the transfer that was cut is forgotten",
        "part(index).cut = std::exchange(part(index).transfer, nullptr);",
        "part(index).transfer = nullptr;",
    ),
    cut(
        "cut",
        "the attempt has the number of the one before",
        "  ++attempt_;\n" + _STORE_WAITING,
        _STORE_WAITING,
    ),
    cut("cut", "it goes on reading", _STORE_WAITING),
    cut(
        "cut",
        "nothing is asked for",
        "  changed_.notify_all();\n  ask_to_connect(now);",
        "  changed_.notify_all();",
    ),
    cut(
        "cut",
        "those who wait are not told",
        "  changed_.notify_all();\n  ask_to_connect(now);",
        "  ask_to_connect(now);",
    ),
    cut(
        "settled",
        "the first part that ends is the end",
        "  if (--alive_ == 0) conclude();",
        "  --alive_;\n  conclude();",
    ),
    cut("settled", "the end of a part is not recorded", "  part(index).state = state;\n"),
    cut("settled", "the last end is not the end", "  if (--alive_ == 0) conclude();", "  --alive_;"),
    cut("settled", "nobody sees the end", _STORE_END),
    cut(
        "settled",
        "those who await it are not told",
        "  for (const auto& [queue, token] : watchers_) queue->push(token);\n",
    ),
    cut(
        "settled",
        "those who wait are not told",
        "  watchers_.clear();\n  changed_.notify_all();",
        "  watchers_.clear();",
    ),
    cut(
        "settled",
        "who asks to be told after the end waits for ever",
        "  if (done()) return false;\n  watchers_",
        "  watchers_",
    ),
    cut(
        "settled",
        "a relay's unused sources are not released",
        "    ask({PullAction::Kind::kUnused, attempt_ + 1});\n",
    ),
    cut(
        "settled",
        "the source that was read counts as unused",
        "ask({PullAction::Kind::kUnused, attempt_ + 1})",
        "ask({PullAction::Kind::kUnused, attempt_})",
    ),
    cut(
        "valid", "an owner that is untold counts as told", "    ended = std::min(ended, PullState::kValid);\n"
    ),
    cut("valid", "an owner is left untold", "ask({PullAction::Kind::kSettle, index});", ";"),
    cut(
        "valid",
        "a seat that is not to be settled is settled",
        "if (one.transfer->seat().settles()) ask({PullAction::Kind::kSettle",
        "ask({PullAction::Kind::kSettle",
    ),
    cut(
        "valid",
        "another part's owner is told",
        "ask({PullAction::Kind::kSettle, index})",
        "ask({PullAction::Kind::kSettle, 0})",
    ),
    cut(
        "failed", "it is valid", "    if (one.state == TransferState::kFailed) ended = PullState::kFailed;\n"
    ),
    cut("failed", "the code of a failure is not recorded", "  part(index).code = code;\n"),
    cut(
        "failed",
        "a part that never started has no reason",
        "if (part(index).code == Code::kCancelled && !part(index).transfer) {",
        "if (false) {",
    ),
    cut("failed", "a relay's lease goes on", "  " + _FAILED + "\n"),
    Change(
        "failed",
        "a relay's lease ends after the pull",
        [("  " + _FAILED + "\n", ""), (_STORE_END, _STORE_END + "  " + _FAILED + "\n")],
    ),
    cut(
        "failed",
        "a relay that failed releases sources",
        "if (ended != PullState::kFailed && attempt_ + 1 < relaying_.num_sources)",
        "if (attempt_ + 1 < relaying_.num_sources)",
    ),
    cut(
        "failed",
        "a cancelled relay is offered on until its reads end",
        "    if (relaying_.failed) relaying_.failed();  // its readers are not told that what"
        " comes now is valid\n",
    ),
    cut(
        "failed",
        "a cancel does not reach the transfers",
        "  for (const auto& transfer : running) transfer->cancel();\n",
    ),
    cut("failed", "a close cancels what is read", "    if (why != Stop::kCancelled) return;\n"),
    cut(
        "failed",
        "cancel() does not wait",
        "  stop(Stop::kCancelled);\n  wait(-1);",
        "  stop(Stop::kCancelled);",
    ),
    cut("failed", "proven tokens decrease", "if (tokens > proven_tokens()) proven", "proven"),
]
"""Each edge is removed, leads elsewhere, or loses a rule that guards it or an action that comes with it."""

PLANTED: list[Change] = [
    cut(
        "d1",
        "a slot read is posted behind data of one lane while another lane's is in flight",
        "lanes_used_ == 1ull << lane;",
        "true;",
        TRANSFER,
    ),
    cut(
        "d3",
        "a slot read that overtook the data proves it",
        "} else if (!all_landed()) {",
        "} else if (false) {",
        TRANSFER,
    ),
    Change(
        "d1, d3",
        "both",
        [("lanes_used_ == 1ull << lane;", "true;"), ("} else if (!all_landed()) {", "} else if (false) {")],
        TRANSFER,
    ),
    cut(
        "d9",
        "a dropped read under a validating look is forgotten",
        "    if (phase_ == Phase::kValidate) phase_ = Phase::kRead;  // the look behind these reads was lost"
        " with them\n",
        "",
        TRANSFER,
    ),
    cut(
        "d5",
        "the nonce is stored before `ready`",
        _READY + _NONCE,
        _NONCE + _READY,
        LEASES,
    ),
    cut(
        "d6",
        "the deadline of the first seat alone is moved",
        "    if (seat.open) deadlines_.set(seat.slot, deadline_ns);\n",
        "    if (seat.open) return deadlines_.set(seat.slot, deadline_ns);\n",
        LEASES,
    ),
    cut(
        "lane",
        "a settle that cannot be posted while the lane is held is dropped",
        "    words_.push_back(word);\n",
        "",
        LANE,
    ),
    cut(
        "lane",
        "a queued settle that dies with its lane is not returned",
        "    lost_.insert(lost_.end(), words.begin(), words.end());\n",
        "",
        LANE,
    ),
    cut(
        "lane",
        "the control thread is not told of it",
        "  if (on_lost_) on_lost_();\n",
        "",
        LANE,
    ),
    cut(
        "lane",
        "holders of a lane wake nobody",
        "  if (!idle()) return driver_->wake();\n  if (has_unflushed_writes()) driver_->wake_from_doze();\n",
        "",
        LANE,
    ),
    cut("lane", "helping callers wake nobody", "  if (drove) wake_driver();\n", "", LANE),
    cut(
        "lane",
        "submit() wakes nobody",
        "if (!transfer) return driver_->wake();",
        "if (!transfer) return;",
        LANE,
    ),
    cut(
        "lane", "reads of a stopped pull are not called back", "    cancel_posts(transfer, now);\n", "", LANE
    ),
    cut(
        "lane",
        "reads that cannot be called back count as called back",
        "      give_up_ns_ = std::min(give_up_ns_, now + kCancelNs);\n      continue;\n",
        "",
        LANE,
    ),
    cut("lane", "a broken lane does not close its endpoint", "  endpoint_->close();\n", "", LANE),
    cut(
        "lane",
        "a settle that is the only operation in flight is not polled",
        "(send_settles && num_posted_ > 0)",
        "false",
        LANE,
    ),
    cut(
        "lane",
        "an endpoint that has work is not polled while its lane stands by",
        "  next_check_ns_ = 0;  // the next round polls, also if this lane has nothing under way\n",
        "",
        LANE,
    ),
    cut(
        "lane",
        "an owner counts as asked after a settle that nobody awaits",
        "  if (--num_awaited_ == 0) asked_ns_ = 0;\n",
        "  --num_awaited_;\n",
        LANE,
    ),
    cut(
        "thread",
        "each round allocates",
        "    lanes.clear();  // not under the mutex: one of them may end here\n",
        "    std::vector<std::shared_ptr<Lane>>().swap(lanes);\n",
        THREAD,
    ),
    cut(
        "thread",
        "it sleeps for a second after it found a lane held",
        "ticking || copying || held",
        "ticking || copying",
        THREAD,
    ),
    cut(
        "thread",
        "it sleeps without a look whether it was woken meanwhile",
        "if (wakes == wakes_.load(std::memory_order_seq_cst)) {",
        "if (true) {",
        THREAD,
    ),
    cut(
        "transfer",
        "cancel() wakes nobody",
        "  driver_->wake();\n}\n\nvoid Transfer::expire",
        "}\n\nvoid Transfer::expire",
        TRANSFER,
    ),
    cut(
        "transfer",
        "a lane that breaks does not wake the others",
        "  detach(why, now);\n  if (!done()) driver_->wake();",
        "  detach(why, now);",
        TRANSFER,
    ),
    cut(
        "transfer",
        "an end is not told",
        "    observer->transfer_ended(part_, state(), result_.code());\n",
        "",
        TRANSFER,
    ),
]
"""Bugs in what a pull relies on."""


LEASE_HEADER = "csrc/lease/lease_table.h"
_COUNT = "  num_active_.store(static_cast<uint32_t>(leases_.size()) + num_expiring_soft_);\n"
_HARD_FENCE = "  full_fence();\n  add_reader(seat.slot);\n"
_SOFT_FENCE = "  full_fence();\n  num_expiring_soft_ -="

ORDERS = [
    cut("publish", "the nonce is stored before `ready`", _READY + _NONCE, _NONCE + _READY, LEASES),
    cut(
        "publish", "the nonce is stored without release", _NONCE, _NONCE.replace("release", "relaxed"), LEASES
    ),
    cut(
        "set_ready",
        "`ready` is stored without release",
        "shared.store(ready, std::memory_order_release)",
        "shared.store(ready, std::memory_order_relaxed)",
        LEASES,
    ),
    cut("end of a lease", "no fence behind the tombstone", _HARD_FENCE, "  add_reader(seat.slot);\n", LEASES),
    Change(
        "end of a soft lease",
        "no fence behind the tombstone, and none in revoke()",
        [(_SOFT_FENCE, "  num_expiring_soft_ -="), ("  release_fence();", "  //")],
        LEASES,
    ),
    cut("revoke", "no fence for leases that another thread has ended", "  release_fence();", "  //", LEASES),
    cut(
        "extend, renew",
        "only the first seat's deadline is moved",
        "    if (seat.open) deadlines_.set(seat.slot, deadline_ns);\n",
        "    if (seat.open) return deadlines_.set(seat.slot, deadline_ns);\n",
        LEASES,
    ),
    cut(
        "sweep",
        "a standstill of the owner ages leases by all of it",
        "  if (since > kMostAgeingNs) paused_ns_ += since - kMostAgeingNs;\n",
        "  static_cast<void>(since);\n",
        LEASES,
    ),
    cut(
        "sweep",
        "a lease's slot is free before its end is reported",
        "  ended_slots_.push_back(seat.slot);\n",
        "  ended_slots_.push_back(seat.slot);\n  free_.push(seat.slot);\n",
        LEASES,
    ),
    cut(
        "sleep",
        "the count of leases is stored with release only",
        _COUNT,
        _COUNT.replace(");\n", ",\n                    std::memory_order_release);\n"),
        LEASES,
    ),
    cut(
        "sleep",
        "the flag is stored with release only",
        "    asleep_.store(true);\n",
        "    asleep_.store(true, std::memory_order_release);\n",
        LEASE_HEADER,
    ),
    cut(
        "sleep",
        "the flag is loaded with acquire only",
        "return asleep_.load();",
        "return asleep_.load(std::memory_order_acquire);",
        LEASE_HEADER,
    ),
    cut(
        "sleep",
        "it looks for leases before it stores that it sleeps",
        "    asleep_.store(true);\n    const bool works = has_work();\n",
        "    const bool works = has_work();\n    asleep_.store(true);\n",
        LEASE_HEADER,
    ),
]
"""Bugs of the lease table that the model over weak memory is for."""


def changed_text(change: Change) -> str:
    """Returns the file with the change. Raises ValueError if a patch does not apply exactly once."""
    text = (ROOT / change.file).read_text()
    for old, new in change.patches:
        if text.count(old) != 1:
            raise ValueError(
                f"{change.edge}: {change.what}: {change.file} has {text.count(old)} times: {old!r}"
            )
        text = text.replace(old, new)
    return text


class Builds:
    """Links the tests again with one changed object, by the commands that built them."""

    def __init__(self, build: Path, scratch: Path) -> None:
        self.build, self.scratch = build, scratch
        self.commands: dict[tuple[str, str], list[str]] = {}
        for entry in json.loads((build / "compile_commands.json").read_text()):
            words = shlex.split(entry["command"])
            name = (
                str(Path(entry["file"]).relative_to(ROOT))
                if ROOT in Path(entry["file"]).parents
                else entry["file"]
            )
            self.commands[name, variant_of(words)] = words

    def objects(self, variant: str, wanted: re.Pattern[str]) -> dict[str, str]:
        """Returns the object of each source of a variant."""
        return {
            source: str(self.build / words[words.index("-o") + 1])
            for (source, of), words in self.commands.items()
            if of == variant and wanted.search(source)
        }

    def compile(self, change: Change, variant: str, name: str) -> list[str]:
        """Returns the objects that the changed file makes: its own, or of a header those of all sources."""
        changed = self.scratch / name / change.file.removeprefix("csrc/")
        changed.parent.mkdir(parents=True, exist_ok=True)
        changed.write_text(changed_text(change))
        of_header = change.file.endswith(".h")
        sources = sorted(self.objects(variant, re.compile("."))) if of_header else [change.file]
        return [
            self.compile_one(source, ROOT / source if of_header else changed, variant, self.scratch / name)
            for source in sources
        ]

    def compile_one(self, source: str, text: Path, variant: str, folder: Path) -> str:
        """Returns the object of one source, compiled with the headers that `folder` has first."""
        words = list(self.commands[source, variant])
        made = folder / f"{Path(source).stem}.{variant}.o"
        words[words.index("-o") + 1] = str(made)
        words[-1] = str(text)
        words = [word for word in words if word not in ("-Werror", "-MD")]
        for flag in ("-MT", "-MF"):
            at = words.index(flag) if flag in words else None
            if at is not None:
                del words[at : at + 2]
        if variant == PRODUCT:
            words.append("-O1")
        first = next(at for at, word in enumerate(words) if word.startswith("-I"))
        words.insert(first, f"-I{folder}")
        subprocess.run(words, cwd=self.build, check=True)
        return str(made)

    def link(self, change: Change, variant: str, name: str) -> Path:
        """Returns the program with the change."""
        changed = self.compile(change, variant, name)
        binary = self.scratch / name / variant
        if variant != PRODUCT:
            objects = self.objects(variant, re.compile("."))
            of_header = change.file.endswith(".h")
            rest = [path for source, path in objects.items() if not of_header and source != change.file]
        else:
            rest = [
                *self.objects(PRODUCT, UNIT_TESTS).values(),
                str(core(self.build)),
                "-lgtest",
                "-lgtest_main",
                "-ldl",
            ]
        command = ["c++", "-o", str(binary), *changed, *rest, "-pthread", "-Wl,--allow-multiple-definition"]
        subprocess.run(command, check=True)
        return binary


def core(build: Path) -> Path:
    """Returns the library of the product."""
    own = build / "libkvlink_core.a"
    return own if own.exists() else max(ROOT.glob("build/cp*/libkvlink_core.a"), key=os.path.getmtime)


def first_failure(binary: Path, seconds: float, environment: dict[str, str]) -> str:
    """Returns the first line that says what fails, or FOUND_NOTHING."""
    try:
        ran = subprocess.run(
            [binary], capture_output=True, text=True, timeout=seconds, env={**os.environ, **environment}
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    if ran.returncode == 0:
        return FOUND_NOTHING
    for line in (ran.stdout + ran.stderr).splitlines():
        if match := re.search(r"FAILED  \] (\S+?)(,| \(|$)", line) or re.match(
            r"(seed .*|  \([a-i]\) [^:]*)", line
        ):
            took = re.search(r"^found by .* in ([\d.]+) CPU-s$", ran.stderr, re.MULTILINE)
            return match[1].strip() + (f" ({took[1]} s)" if took else "")
    return f"ends by signal {-ran.returncode}" if ran.returncode < 0 else "fails"


def try_change(builds: Builds, number: int, change: Change, by_units: bool) -> tuple[str, str]:
    """Returns what the unit tests and the simulation find."""
    name = f"change{number}"
    unit = FOUND_NOTHING
    if by_units and change.file.endswith(".cc"):
        unit = first_failure(builds.link(change, PRODUCT, name), 60, {"GTEST_BRIEF": "1"})
    proof = MODEL if change in ORDERS else SIMULATION
    simulated = first_failure(builds.link(change, proof, name), 300, {})
    shutil.rmtree(builds.scratch / name)
    return unit, simulated


def row(change: Change, found: tuple[str, str]) -> str:
    """Returns a row of the table."""
    unit, simulated = found
    source, target, _ = EDGES.get(change.edge, (change.edge, "", ""))
    edge = f"{source} → {target}" if target else change.edge
    seed = re.sub(r"seed (\d+) at .* ms: ", r"\1: ", simulated)
    return f"| {edge} | {change.what} | {unit.removeprefix('All/')} | {seed} |"


def main(arguments: Iterable[str] | None = None) -> int:
    """Prints the table. Returns 1 if nothing finds a change."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "cpp")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--simulation", action="store_true", help="without the unit tests")
    parser.add_argument("--model", action="store_true", help="only what the model over weak memory is for")
    options = parser.parse_args(None if arguments is None else list(arguments))
    changes = [
        change
        for change in (ORDERS if options.model else [*CHANGES, *PLANTED, *ORDERS])
        if not options.names or any(name in f"{change.edge}: {change.what}" for name in options.names)
    ]
    survived = 0
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        builds = Builds(options.build, Path(scratch))
        for change, found in zip(
            changes,
            pool.map(lambda job: try_change(builds, *job, not options.simulation), enumerate(changes)),
            strict=True,
        ):
            survived += found == (FOUND_NOTHING, FOUND_NOTHING)
            print(row(change, found), flush=True)
    print(f"{len(changes)} changes, {survived} found by nothing", file=sys.stderr)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
