// SPDX-License-Identifier: Apache-2.0
// Cuts a token range at the block boundaries of both sides, and a block into its contiguous pieces. Internal
// to plan/planner.cc.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>

#include "base/check.h"
#include "plan/planner.h"

namespace kvlink {

/// Tokens within one block of either side. Offsets count from a plane's start.
struct Span {
  uint64_t remote, local;
  uint32_t tokens;
};

class Spans {
 public:
  /// REQUIRES lists that cover `tokens`.
  Spans(const Layout& owner, std::span<const uint32_t> owner_blocks, const Layout& reader,
        std::span<const uint32_t> reader_blocks, Range tokens)
      : owner_(owner, owner_blocks, tokens.begin),
        reader_(reader, reader_blocks, tokens.begin),
        left_(tokens.end - tokens.begin) {
    KVLINK_CHECK(left_ == 0 || owner_blocks.size() * owner.block_tokens >= tokens.end);
    KVLINK_CHECK(left_ == 0 || reader_blocks.size() * reader.block_tokens >= tokens.end);
  }

  bool next(Span& span) {
    if (left_ == 0) return false;
    const uint32_t tokens = std::min({left_, owner_.tokens_left(), reader_.tokens_left()});
    span = {owner_.advance(tokens), reader_.advance(tokens), tokens};
    left_ -= tokens;
    return true;
  }

 private:
  class Cursor {
   public:
    Cursor(const Layout& layout, std::span<const uint32_t> blocks, uint32_t token)
        : next_(blocks.data() + token / layout.block_tokens),
          block_tokens_(layout.block_tokens),
          token_(token % layout.block_tokens),
          block_stride_(layout.block_stride),
          token_stride_(layout.token_stride) {}

    uint32_t tokens_left() const { return block_tokens_ - token_; }
    uint64_t advance(uint32_t tokens) {
      const uint64_t at = *next_ * block_stride_ + token_ * token_stride_;
      token_ += tokens;
      if (token_ == block_tokens_) {
        token_ = 0;
        ++next_;
      }
      return at;
    }

   private:
    const uint32_t* next_;
    uint32_t block_tokens_, token_;
    uint64_t block_stride_, token_stride_;
  };

  Cursor owner_, reader_;
  uint32_t left_;
};

/// Spans of tokens that both ends hold, where ranks share tokens.
class CommonSpans {
 public:
  /// REQUIRES lists that cover each end's part of `tokens`.
  CommonSpans(const Layout& owner, std::span<const uint32_t> owner_blocks, const Layout& reader,
              std::span<const uint32_t> reader_blocks, Range tokens)
      : owner_(owner, owner_blocks), reader_(reader, reader_blocks), tokens_(tokens) {
    for (const auto& [layout, blocks] : {std::pair(&owner, owner_blocks), {&reader, reader_blocks}}) {
      KVLINK_CHECK(tokens.begin >= tokens.end ||
                   blocks.size() * layout->block_tokens >= layout->tokens.num_before(tokens.end));
    }
  }

  bool next(Span& span) {
    uint64_t at = tokens_.begin;
    while (at < tokens_.end) {  // to the first token from there on that both have
      const uint64_t next = reader_.first_from(owner_.first_from(at));
      if (next == at) break;
      at = next;
    }
    if (at >= tokens_.end) return false;
    const uint64_t left = std::min({tokens_.end - at, owner_.tokens_left(at), reader_.tokens_left(at)});
    span = {owner_.offset_of(at), reader_.offset_of(at), static_cast<uint32_t>(left)};
    tokens_.begin = static_cast<uint32_t>(at + left);
    return true;
  }

  uint32_t num_tokens() const {
    CommonSpans all = *this;
    uint32_t tokens = 0;
    for (Span span; all.next(span);) tokens += span.tokens;
    return tokens;
  }

 private:
  /// One end.
  class End {
   public:
    End(const Layout& layout, std::span<const uint32_t> blocks) : layout_(&layout), blocks_(blocks) {}

    uint64_t first_from(uint64_t position) const {
      return layout_->tokens.position_of(layout_->tokens.num_before(position));
    }
    /// Returns how many tokens follow each other in the same block. REQUIRES a position that it holds.
    uint64_t tokens_left(uint64_t position) const {
      KVLINK_DCHECK(first_from(position) == position);
      const uint64_t in_block = index_of(position) % layout_->block_tokens;
      const uint64_t of_block = layout_->block_tokens - in_block;
      if (layout_->tokens.is_whole()) return of_block;
      return std::min<uint64_t>(of_block, layout_->tokens.interleave - position % layout_->tokens.interleave);
    }
    uint64_t offset_of(uint64_t position) const {
      const uint64_t index = index_of(position);
      return blocks_[index / layout_->block_tokens] * layout_->block_stride +
             index % layout_->block_tokens * layout_->token_stride;
    }

   private:
    uint64_t index_of(uint64_t position) const { return layout_->tokens.num_before(position); }

    const Layout* layout_;
    std::span<const uint32_t> blocks_;
  };

  End owner_, reader_;
  Range tokens_;
};

struct Steps {
  uint32_t count;
  uint64_t remote, local;  // strides
};

/// The contiguous pieces of a span: outer.count x inner.count of them, `bytes` each, in the owner's address
/// order.
struct Pieces {
  Steps outer, inner;
  uint64_t bytes;

  /// Folds the loops that are contiguous at both ends into the piece.
  static Pieces of(Steps tokens, Steps heads, uint64_t row_bytes) {
    Pieces pieces{heads, tokens, row_bytes};
    if (pieces.inner.remote > pieces.outer.remote) std::swap(pieces.inner, pieces.outer);
    for (Steps* steps : {&pieces.inner, &pieces.outer}) {
      if (steps->count == 1) continue;
      if (steps->remote != pieces.bytes || steps->local != pieces.bytes) break;
      pieces.bytes *= std::exchange(steps->count, 1);
    }
    return pieces;
  }

  uint64_t count() const { return uint64_t{outer.count} * inner.count; }

  template <typename Visit>
  void for_each(const Span& span, Visit&& visit) const {
    for (uint32_t i = 0; i < outer.count; ++i) {
      uint64_t remote = span.remote + i * outer.remote, local = span.local + i * outer.local;
      for (uint32_t j = 0; j < inner.count; ++j, remote += inner.remote, local += inner.local)
        visit(remote, local);
    }
  }
};

}  // namespace kvlink
