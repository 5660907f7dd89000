// SPDX-License-Identifier: Apache-2.0
#include "capi/layouts.h"

#include <algorithm>
#include <charconv>
#include <string>

#include "plan/layout_check.h"

namespace kvlink::capi {
namespace {

constexpr std::string_view kIdentity = "model-id=";
constexpr size_t kIdentityDigits = 16;
constexpr char kInPython[] = ", which kvlink plans in Python only";

/// The heads of a rank are an equal share, or one that it shares with its neighbours.
Outcome check_heads(const CardLayout& layout) {
  const uint64_t total = layout.total_heads, size = layout.tp_size, rank = layout.tp_rank;
  if (total == 0 || rank >= size || (total % size != 0 && size % total != 0)) {
    return refuse("layout: tp_rank " + std::to_string(rank) + " of tp_size " + std::to_string(size) +
                  " cannot share " + std::to_string(total) + " total_heads");
  }
  const uint64_t first = rank * total / size, number = std::max<uint64_t>(1, total / size);
  if (layout.memory.first_head == first && layout.memory.num_heads == number) return {};
  return refuse("layout: rank " + std::to_string(rank) + " of " + std::to_string(size) + " holds " +
                std::to_string(number) + " heads from " + std::to_string(first) + " on, not " +
                std::to_string(layout.memory.num_heads) + " from " +
                std::to_string(layout.memory.first_head) + " on");
}

Status differs(const std::string& what, const std::string& here, const std::string& there) {
  return Status::LayoutMismatch(what + " differs: " + here + " here, " + there + " there");
}

Status check_group(const CardLayout& own, const CardLayout& owner) {
  if (own.model != owner.model && !own.model.empty() && !owner.model.empty() &&
      model_number(own.model) == 0) {
    return differs("model", own.model, owner.model);
  }
  if (own.dtype != owner.dtype) return differs("dtype", own.dtype, owner.dtype);
  if (own.total_heads != owner.total_heads) {
    return differs("total_heads", std::to_string(own.total_heads), std::to_string(owner.total_heads));
  }
  if (own.is_state != owner.is_state) {
    return differs("is_state", std::to_string(own.is_state), std::to_string(owner.is_state));
  }
  if (!owner.pipeline.bounds.empty()) {
    return Status::Config("the owner has one stage of a pipeline" + std::string(kInPython));
  }
  if (owner.memory.tokens.size > 1) {
    return Status::Config("the owner shares its tokens with other ranks" + std::string(kInPython));
  }
  if (own.tp_size != owner.tp_size || own.tp_rank != owner.tp_rank) {
    return Status::Config("the owner is tensor-parallel rank " + std::to_string(owner.tp_rank) + " of " +
                          std::to_string(owner.tp_size) + " and this worker rank " +
                          std::to_string(own.tp_rank) + " of " + std::to_string(own.tp_size) + kInPython);
  }
  return {};
}

}  // namespace

Outcome take_layout(const kvl_layout* from, CardLayout& into) {
  kvl_layout taken;
  if (Outcome outcome = take_struct(from, taken, "kvl_layout"); !outcome.ok()) return outcome;
  if (taken.flags & ~uint32_t{KVL_LAYOUT_STATE})
    return refuse("kvl_layout.flags has bits that are not known");
  if (taken.num_planes == 0 || taken.num_planes > kMaxPlanes || !taken.planes) {
    return refuse("a layout has 1 to " + std::to_string(kMaxPlanes) + " planes");
  }
  if (Outcome outcome = take_text(taken.model, into.model, "model", kMaxOpaqueBytes); !outcome.ok())
    return outcome;
  if (Outcome outcome = take_text(taken.dtype, into.dtype, "dtype"); !outcome.ok()) return outcome;
  into.total_heads = taken.total_heads;
  into.tp_rank = taken.tp_rank;
  into.tp_size = std::max(taken.tp_size, 1u);
  into.is_state = (taken.flags & KVL_LAYOUT_STATE) != 0;
  into.context_tp_ranks = 1;
  into.memory = {taken.num_blocks,
                 taken.block_tokens,
                 taken.first_head,
                 taken.num_heads,
                 taken.row_bytes,
                 taken.block_stride,
                 taken.token_stride,
                 taken.head_stride,
                 {},
                 {}};
  for (uint32_t index = 0; index < taken.num_planes; ++index) {
    const kvl_plane& plane = taken.planes[index];
    into.memory.planes.push_back({plane.region, plane.layer, plane.offset});
  }
  if (into.is_state && taken.block_tokens != 1)
    return refuse("layout: a block holds one state, so block_tokens is 1");
  return check_heads(into);
}

Status check_groups(const WorkerCard& owner, std::span<const CardLayout> own) {
  if (own.size() != owner.layouts.size()) {
    return differs("the number of cache groups", std::to_string(own.size()),
                   std::to_string(owner.layouts.size()));
  }
  for (size_t group = 0; group < own.size(); ++group) {
    if (Status status = check_group(own[group], owner.layouts[group]); !status.ok()) {
      return {status.code(), owner.worker_id + ": " + status.what()};
    }
  }
  return {};
}

uint64_t model_number(std::string_view text) {
  if (!text.starts_with(kIdentity)) return 0;
  const std::string_view rest = text.substr(kIdentity.size());
  if (rest.size() < kIdentityDigits || (rest.size() > kIdentityDigits && rest[kIdentityDigits] != ' '))
    return 0;
  const char* const end = rest.data() + kIdentityDigits;
  uint64_t number = 0;
  const auto [stopped, error] = std::from_chars(rest.data(), end, number, 16);
  const bool lower = std::none_of(rest.data(), end, [](char digit) { return digit >= 'A' && digit <= 'F'; });
  return error == std::errc() && stopped == end && lower ? number : 0;
}

}  // namespace kvlink::capi
