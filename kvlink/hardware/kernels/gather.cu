// SPDX-License-Identifier: Apache-2.0
// Scattered pieces, each copied by some neighbouring threads. Compiled at run time, see __init__.py.

// As csrc/device/gather_tables.h fills it. Pieces of one launch do not overlap.
struct Piece {
  unsigned long long from, to;
  unsigned int bytes, unused;
};

// Neighbouring lanes take neighbouring words, `kAhead` of them before the first is stored: loads from another GPU, or
// from host memory, take a microsecond.
template <typename Word>
__device__ void copy(const Piece& piece, unsigned int lane, unsigned int step) {
  constexpr unsigned int kAhead = 4;
  const Word* const from = reinterpret_cast<const Word*>(piece.from);
  Word* const to = reinterpret_cast<Word*>(piece.to);
  const unsigned int count = piece.bytes / sizeof(Word);
  unsigned int at = lane;
  for (; at + (kAhead - 1) * step < count; at += kAhead * step) {
    Word held[kAhead];
#pragma unroll
    for (unsigned int i = 0; i < kAhead; ++i) held[i] = __ldcs(from + at + i * step);
#pragma unroll
    for (unsigned int i = 0; i < kAhead; ++i) __stcs(to + at + i * step, held[i]);
  }
  for (; at < count; at += step) __stcs(to + at, __ldcs(from + at));
}

// Added to both ends of every piece.
struct Repeat {
  unsigned long long from, to;
};

// `lanes` threads take a piece; they divide a block's. The grid's second dimension counts the pieces as they are, then
// their repeats, which lie behind them.
extern "C" __global__ void kvlink_gather(const Piece* pieces, unsigned int num_pieces, unsigned int lanes) {
  const unsigned int index = blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes, lane = threadIdx.x % lanes;
  if (index >= num_pieces) return;
  Piece piece = pieces[index];
  if (blockIdx.y > 0) {
    const Repeat repeat = reinterpret_cast<const Repeat*>(pieces + num_pieces)[blockIdx.y - 1];
    piece.from += repeat.from;
    piece.to += repeat.to;
  }
  const unsigned long long alignment = piece.from | piece.to | piece.bytes;
  if (alignment % 16 == 0) {
    copy<uint4>(piece, lane, lanes);
  } else if (alignment % 8 == 0) {
    copy<uint2>(piece, lane, lanes);
  } else if (alignment % 4 == 0) {
    copy<unsigned int>(piece, lane, lanes);
  } else {
    copy<unsigned char>(piece, lane, lanes);
  }
}
