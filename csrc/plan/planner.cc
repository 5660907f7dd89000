// SPDX-License-Identifier: Apache-2.0
// A token range becomes spans (one block of each side), spans become contiguous pieces in the owner's address
// order, and a writer joins pieces that touch. Groups of planes with equal layouts are planned once and
// stamped.
#include "plan/planner.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "plan/block_spans.h"
#include "plan/layout_check.h"
#include "plan/op_writer.h"

namespace kvlink {
namespace {

constexpr double kMaxReserved = 1 << 20;  // pieces, 40 bytes each, untouched until written
constexpr double kMaxSegments = 1 << 28;  // 4 GiB of them: a mistake, and far below what ReadOp can index

/// Returns whether `moved` equals `first` with every plane moved by the same distance at either end.
bool alike(const std::vector<PlanePair>& planes, const Group& first, const Group& moved) {
  if (first.count != moved.count) return false;
  const PlanePair *a = &planes[first.first], *b = &planes[moved.first];
  for (uint32_t i = 1; i < first.count; ++i) {
    if (a[i].local_region != a->local_region || b[i].local_region != b->local_region ||
        a[i].remote - a->remote != b[i].remote - b->remote ||
        a[i].local - a->local != b[i].local - b->local) {
      return false;
    }
  }
  return true;
}

/// REQUIRES `planes` in the owner's address order. `block_bytes` spans the rows of one block.
Arrangement arrange(std::vector<PlanePair> planes, uint64_t block_stride, uint64_t block_bytes) {
  Arrangement made;
  made.planes = std::move(planes);
  const auto& sorted = made.planes;
  KVLINK_DCHECK(std::is_sorted(sorted.begin(), sorted.end(), [](const PlanePair& a, const PlanePair& b) {
    return std::pair(a.remote_region, a.remote) < std::pair(b.remote_region, b.remote);
  }));
  for (uint32_t i = 0; i < sorted.size();) {
    const PlanePair& first = sorted[i];
    Group group{i, 0, false, false};
    while (i < sorted.size() && sorted[i].remote_region == first.remote_region &&
           (group.count == 0 || sorted[i].remote - first.remote < block_stride)) {
      group.interleaved |= group.count > 0 && sorted[i].remote - sorted[i - 1].remote < block_bytes;
      ++group.count;
      ++i;
    }
    group.like_first = !made.groups.empty() && alike(sorted, made.groups[0], group);
    made.groups.push_back(group);
  }
  made.all_alike = std::all_of(made.groups.begin() + !made.groups.empty(), made.groups.end(),
                               [](const Group& group) { return group.like_first; });
  return made;
}

Repeat repeat_of(const PlanePair& first, const PlanePair& plane) {
  const auto address = [](const PlanePair& of) { return reinterpret_cast<uintptr_t>(of.local); };
  return {plane.remote - first.remote, static_cast<int64_t>(address(plane) - address(first)),
          plane.remote_region, plane.local_region};
}

struct BlockRange {
  size_t first, end;
};

/// Returns the indices of the blocks with a worker's part of the tokens. REQUIRES a range that is not empty.
BlockRange blocks_of(const Layout& layout, Range tokens) {
  KVLINK_CHECK(tokens.begin < tokens.end);
  const uint64_t first = layout.tokens.num_before(tokens.begin), end = layout.tokens.num_before(tokens.end);
  if (first == end) return {};
  return {first / layout.block_tokens, (end - 1) / layout.block_tokens + 1};
}

Status check_list(const char* name, std::span<const uint32_t> blocks, const Layout& layout, Range tokens) {
  if (tokens.begin == tokens.end) return {};
  const auto [first, last] = blocks_of(layout, tokens);
  if (last > blocks.size()) {
    return Status::Config(std::string(name) + " has " + std::to_string(blocks.size()) + " blocks of " +
                          std::to_string(layout.block_tokens) + " tokens: " + std::to_string(tokens.end) +
                          " tokens do not fit");
  }
  uint32_t highest = 0;
  for (size_t i = first; i < last; ++i) highest = std::max(highest, blocks[i]);
  if (highest < layout.num_blocks) return {};
  const auto wrong = std::find_if(blocks.begin() + first, blocks.end(),
                                  [&](uint32_t id) { return id >= layout.num_blocks; });
  return Status::Config(std::string(name) + " names block " + std::to_string(*wrong) + " but there are " +
                        std::to_string(layout.num_blocks) + ": see index " +
                        std::to_string(wrong - blocks.begin()));
}

/// REQUIRES ids below num_blocks.
bool has_repeated(std::span<const uint32_t> ids, uint32_t num_blocks) {
  constexpr size_t kFew = 16;  // comparing all pairs is cheaper than clearing a bitmap
  if (ids.size() <= kFew) {
    for (size_t i = 1; i < ids.size(); ++i) {
      if (std::find(ids.begin(), ids.begin() + i, ids[i]) != ids.begin() + i) return true;
    }
    return false;
  }
  std::vector<uint64_t> seen(num_blocks / 64 + 1);
  uint64_t repeated = 0;
  for (uint32_t id : ids) {
    repeated |= seen[id / 64] >> (id % 64) & 1;
    KVLINK_DCHECK(id < num_blocks);
    seen[id / 64] |= uint64_t{1} << (id % 64);
  }
  return repeated != 0;
}

/// REQUIRES an id from `first` on that occurs twice.
Status repeated(std::span<const uint32_t> ids, size_t first) {
  size_t at = first + 1;
  KVLINK_DCHECK(std::set(ids.begin() + first, ids.end()).size() < ids.size() - first);
  while (std::find(ids.begin() + first, ids.begin() + at, ids[at]) == ids.begin() + at) ++at;
  return Status::Config("into names a block twice: " + std::to_string(ids[at]) + ", again at index " +
                        std::to_string(at));
}

/// Returns the layers that share memory, each with the next one there.
std::vector<std::pair<uint32_t, uint32_t>> overlaid(std::vector<Plane> planes) {
  const auto key = [](const Plane& plane) { return std::tuple(plane.region, plane.offset, plane.layer); };
  std::sort(planes.begin(), planes.end(), [&](auto& a, auto& b) { return key(a) < key(b); });
  std::vector<std::pair<uint32_t, uint32_t>> pairs;
  for (size_t i = 1; i < planes.size(); ++i) {
    const Plane &before = planes[i - 1], &plane = planes[i];
    if (before.region == plane.region && before.offset == plane.offset) {
      pairs.emplace_back(before.layer, plane.layer);
    }
  }
  return pairs;
}

}  // namespace

Planner::Planner(Layout reader, Layout owner, const std::vector<MemoryRange>& local_regions,
                 const std::vector<uint32_t>& remote_region_index, Range heads)
    : reader_(std::move(reader)), owner_(std::move(owner)), num_heads_(heads.end - heads.begin) {
  const uint64_t skip_remote = (heads.begin - owner_.first_head) * owner_.head_stride;
  const uint64_t skip_local = (heads.begin - reader_.first_head) * reader_.head_stride;
  std::vector<PlanePair> planes;
  for (size_t i = 0; i < owner_.planes.size(); ++i) {
    const Plane &theirs = owner_.planes[i], &ours = reader_.planes[i];
    planes.push_back({theirs.layer, remote_region_index[theirs.region], ours.region,
                      theirs.offset + skip_remote,
                      local_regions[ours.region].base + ours.offset + skip_local});
    num_layers_ = std::max(num_layers_, theirs.layer + 1);
  }
  std::sort(planes.begin(), planes.end(), [](const PlanePair& a, const PlanePair& b) {
    return std::tie(a.remote_region, a.remote) < std::tie(b.remote_region, b.remote);
  });
  all_ = arrange_in_blocks(std::move(planes));
  overlaid_ = overlaid(reader_.planes);
  const uint32_t narrow = std::min(owner_.block_tokens, reader_.block_tokens);
  usual_pieces_ = static_cast<double>(pieces_of(narrow).count());
  most_pieces_ = std::max(usual_pieces_, static_cast<double>(pieces_of(1).count()));
}

Status Planner::plan(std::span<const uint32_t> owner_blocks, std::span<const uint32_t> reader_blocks,
                     const PlanScope& scope, Plan& into) const {
  const Range tokens = closed(scope.tokens, owner_blocks.size(), reader_blocks.size());
  if (Status refused = check(owner_blocks, reader_blocks, {tokens, scope.layers}); !refused.ok()) {
    into.clear();
    return refused;
  }
  if (owner_.tokens.is_whole() && reader_.tokens.is_whole()) {
    const Spans spans(owner_, owner_blocks, reader_, reader_blocks, tokens);
    plan_spans(spans, tokens.end - tokens.begin, scope, into);
  } else {
    const CommonSpans spans(owner_, owner_blocks, reader_, reader_blocks, tokens);
    plan_spans(spans, spans.num_tokens(), scope, into);
  }
  return {};
}

/// Plans `num_tokens` tokens, which are those of the spans.
template <typename Cuts>
void Planner::plan_spans(const Cuts& spans, uint32_t num_tokens, const PlanScope& scope, Plan& into) const {
  const bool every_layer = scope.layers.begin == 0 && scope.layers.end >= num_layers_;
  into.repeats.clear();
  const uint64_t num_planes = every_layer
                                  ? write(all_, spans, num_tokens, scope.fold, into)
                                  : write(of_layers(scope.layers), spans, num_tokens, scope.fold, into);
  into.bytes = num_planes * token_bytes() * num_tokens;
}

Status Planner::check(std::span<const uint32_t> owner_blocks, std::span<const uint32_t> reader_blocks,
                      const PlanScope& scope) const {
  const Range tokens = closed(scope.tokens, owner_blocks.size(), reader_blocks.size());
  if (tokens.begin > tokens.end) return Status::Config("tokens: the range begins after its end");
  if (scope.layers.begin > scope.layers.end) return Status::Config("layers: the range begins after its end");
  if (scope.layers.end > num_layers_ && scope.layers.end != UINT32_MAX) {
    return Status::Config("layers: the range ends at " + std::to_string(scope.layers.end) +
                          " but there are " + std::to_string(num_layers_));
  }
  for (const auto& [upper, lower] : overlaid_) {
    if (scope.layers.begin <= upper && lower < scope.layers.end) {
      return Status::Config("layers " + std::to_string(upper) + " and " + std::to_string(lower) +
                            " share memory at the reader; pull the layers of one cache group at a time");
    }
  }
  if (Status list = check_list("owner_blocks", owner_blocks, owner_, tokens); !list.ok()) return list;
  if (Status list = check_list("into", reader_blocks, reader_, tokens); !list.ok()) return list;
  if (tokens.begin == tokens.end) return {};
  const auto [first, last] = blocks_of(reader_, tokens);
  if (has_repeated(reader_blocks.subspan(first, last - first), reader_.num_blocks)) {
    return repeated(reader_blocks, first);
  }
  if (most_segments(tokens.end - tokens.begin) > kMaxSegments) {
    return Status::Config("tokens: " + std::to_string(tokens.end - tokens.begin) +
                          " are too many for one plan of these layouts; plan them in parts");
  }
  return {};
}

uint64_t Planner::bytes(uint64_t num_tokens, Range layers) const {
  const auto covered = [&](const PlanePair& plane) {
    return plane.layer >= layers.begin && plane.layer < layers.end;
  };
  const uint64_t num_planes = std::count_if(all_.planes.begin(), all_.planes.end(), covered);
  uint64_t total;
  if (__builtin_mul_overflow(num_tokens, token_bytes(), &total)) return UINT64_MAX;
  return __builtin_mul_overflow(total, num_planes, &total) ? UINT64_MAX : total;
}

Range Planner::closed(Range tokens, uint64_t num_owner_blocks, uint64_t num_reader_blocks) const {
  if (tokens.end != UINT32_MAX) return tokens;
  const uint64_t reader_tokens = reader_.tokens.position_of(num_reader_blocks * reader_.block_tokens);
  return {tokens.begin, static_cast<uint32_t>(std::min(
                            {tokens_in(num_owner_blocks), reader_tokens, uint64_t{UINT32_MAX - 1}}))};
}

uint64_t Planner::token_bytes() const { return uint64_t{num_heads_} * owner_.row_bytes; }

Pieces Planner::pieces_of(uint32_t tokens) const {
  return Pieces::of({tokens, owner_.token_stride, reader_.token_stride},
                    {num_heads_, owner_.head_stride, reader_.head_stride}, owner_.row_bytes);
}

/// Returns an upper bound.
double Planner::num_spans(uint32_t tokens) const {
  double cuts = 2.0 + tokens / owner_.block_tokens + tokens / reader_.block_tokens;
  for (const Layout* layout : {&owner_, &reader_}) {
    if (!layout->tokens.is_whole()) cuts += 1.0 + tokens / layout->tokens.interleave;
  }
  return cuts;
}

/// Returns an upper bound, before anything is merged.
double Planner::most_segments(uint32_t tokens) const {
  const double cuts = static_cast<double>(token_bytes()) * tokens / kMaxOpBytes;
  return (num_spans(tokens) * most_pieces_ + cuts) * static_cast<double>(all_.planes.size());
}

Arrangement Planner::arrange_in_blocks(std::vector<PlanePair> planes) const {
  return arrange(std::move(planes), owner_.block_stride,
                 (owner_.block_tokens - 1) * owner_.token_stride + (num_heads_ - 1) * owner_.head_stride +
                     owner_.row_bytes);
}

Arrangement Planner::of_layers(Range layers) const {
  std::vector<PlanePair> planes;
  for (const PlanePair& plane : all_.planes) {
    if (plane.layer >= layers.begin && plane.layer < layers.end) planes.push_back(plane);
  }
  return arrange_in_blocks(std::move(planes));
}

/// Returns the number of planes planned.
template <typename Cuts>
size_t Planner::write(const Arrangement& made, const Cuts& spans, uint32_t tokens, bool fold,
                      Plan& into) const {
  const bool folds = fold && made.all_alike;
  const size_t num_written = folds && !made.groups.empty() ? made.groups[0].count : made.planes.size();
  const double expected = num_spans(tokens) * usual_pieces_ * static_cast<double>(num_written);
  Writer writer(into, static_cast<size_t>(std::min(expected, kMaxReserved)));
  Writer::Mark first{};
  for (const Group& group : made.groups) {
    if (group.like_first && folds) {
      into.repeats.push_back(repeat_of(made.planes[made.groups[0].first], made.planes[group.first]));
      continue;
    }
    if (group.like_first) {
      writer.stamp(first, made.planes[made.groups[0].first], made.planes[group.first]);
      continue;
    }
    write_group({made.planes.data() + group.first, group.count}, group.interleaved, spans, writer);
    if (&group == &made.groups[0]) {
      first = writer.seal();
      if (!folds)
        writer.reserve({first.ops * (made.groups.size() - 1), first.segments * (made.groups.size() - 1)});
    }
  }
  writer.finish();
  return made.planes.size();
}

template <typename Cuts>
void Planner::write_group(std::span<const PlanePair> planes, bool interleaved, Cuts spans,
                          Writer& writer) const {
  Pieces pieces{};
  uint32_t pieces_tokens = 0;
  for (Span span; spans.next(span);) {
    if (span.tokens != pieces_tokens) pieces = pieces_of(pieces_tokens = span.tokens);
    if (interleaved) {
      pieces.for_each(span, [&](uint64_t remote, uint64_t local) {
        for (const PlanePair& plane : planes) writer.put(plane, remote, local, pieces.bytes);
      });
      continue;
    }
    for (const PlanePair& plane : planes) {
      pieces.for_each(
          span, [&](uint64_t remote, uint64_t local) { writer.put(plane, remote, local, pieces.bytes); });
    }
  }
}

namespace {

/// Returns whether every V is directly behind its K, row by row.
bool values_beside_keys(const Layout& layout) {
  if (layout.planes.size() % 2 != 0 || layout.row_bytes > UINT32_MAX / 2) return false;
  for (size_t i = 0; i < layout.planes.size(); i += 2) {
    const Plane &keys = layout.planes[i], &values = layout.planes[i + 1];
    if (keys.region != values.region || keys.layer != values.layer || values.offset < keys.offset ||
        values.offset - keys.offset != layout.row_bytes) {
      return false;
    }
  }
  return true;
}

/// Joins K and V of each row into one row of twice the size.
void join_values_to_keys(Layout& layout) {
  for (size_t i = 0; i < layout.planes.size() / 2; ++i) layout.planes[i] = layout.planes[2 * i];
  layout.planes.resize(layout.planes.size() / 2);
  layout.row_bytes *= 2;
}

Result<Range> common_heads(const Layout& reader, const Layout& owner, Range asked) {
  const Range common{
      std::max({reader.first_head, owner.first_head, asked.begin}),
      std::min({reader.first_head + reader.num_heads, owner.first_head + owner.num_heads, asked.end})};
  if (common.begin < common.end) return common;
  auto text = [](uint64_t begin, uint64_t end) {
    return std::string("[") + std::to_string(begin) + ", " + std::to_string(end) + ")";
  };
  return Status::LayoutMismatch(
      "heads: reader holds " + text(reader.first_head, reader.first_head + reader.num_heads) +
      ", owner holds " + text(owner.first_head, owner.first_head + owner.num_heads) + ", asked for " +
      text(asked.begin, asked.end) + ": nothing in common");
}

}  // namespace

Result<std::shared_ptr<const Planner>> Planner::make(Layout reader, Layout owner,
                                                     std::vector<MemoryRange> local_regions,
                                                     std::vector<uint64_t> remote_region_bytes,
                                                     std::vector<uint32_t> remote_region_index, Range heads) {
  if (remote_region_index.size() != remote_region_bytes.size()) {
    return Status::Config("remote_region_index and remote_region_bytes must be equally long");
  }
  std::vector<uint64_t> local_region_bytes;
  for (const MemoryRange& region : local_regions) local_region_bytes.push_back(region.bytes);
  for (const Status& refused :
       {check_layout(reader, "reader layout", local_region_bytes),
        check_layout(owner, "owner layout", remote_region_bytes), check_same_cache(reader, owner)}) {
    if (!refused.ok()) return refused;
  }
  if (Status shared = check_planes_apart(reader, "reader layout"); !shared.ok()) return shared;
  const Result<Range> common = common_heads(reader, owner, heads);
  if (!common.ok()) return common.status();
  if (values_beside_keys(reader) && values_beside_keys(owner)) {
    join_values_to_keys(reader);
    join_values_to_keys(owner);
  }
  return std::shared_ptr<const Planner>(
      new Planner(std::move(reader), std::move(owner), local_regions, remote_region_index, *common));
}

}  // namespace kvlink
