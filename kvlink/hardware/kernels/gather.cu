// SPDX-License-Identifier: Apache-2.0
// Copies scattered pieces, each by some neighbouring threads. Compiled by `make kernels`.

// A list has three words for each piece: its source, its target, and its number of bytes. Behind them it has two words
// for each repeat of all pieces, which are added to sources and targets. The pieces of one launch do not overlap.
constexpr unsigned int kPieceWords = 3, kRepeatWords = 2;

// The launch's parameters, which may have 4 KiB, as csrc/device/gather_tables.h has them. A list that fits is in `words`;
// a longer one is in the GPU's memory, at `table`.
struct Launch {
  const unsigned long long* table;
  unsigned int num_pieces, num_repeats, lanes, unused;
  unsigned long long words[509];
};

struct Table {
  const unsigned long long* words;
  __device__ unsigned long long operator[](unsigned int at) const { return __ldg(words + at); }
};

struct Words {
  const Launch& launch;
  __device__ unsigned long long operator[](unsigned int at) const { return launch.words[at]; }
};

struct Piece {
  unsigned long long from, to;
  unsigned int bytes;
};

template <typename List>
__device__ Piece piece_at(const List& list, unsigned int index, unsigned int num_pieces) {
  const unsigned int turn = index / num_pieces, at = (index - turn * num_pieces) * kPieceWords;
  Piece piece{list[at], list[at + 1], static_cast<unsigned int>(list[at + 2])};
  if (turn > 0) {
    const unsigned int repeat = num_pieces * kPieceWords + (turn - 1) * kRepeatWords;
    piece.from += list[repeat];
    piece.to += list[repeat + 1];
  }
  return piece;
}

// Neighbouring lanes take neighbouring words. Up to `kAhead` of them are loaded before the first is stored, also at the
// end of a piece: loads from another GPU, or from host memory, take a microsecond.
template <typename Word>
__device__ void copy(const Piece& piece, unsigned int lane, unsigned int step) {
  constexpr unsigned int kAhead = 8;
  const Word* const from = reinterpret_cast<const Word*>(piece.from);
  Word* const to = reinterpret_cast<Word*>(piece.to);
  const unsigned int count = piece.bytes / sizeof(Word);
#pragma unroll 1
  for (unsigned int at = lane; at < count; at += kAhead * step) {
    Word held[kAhead];
#pragma unroll
    for (unsigned int i = 0; i < kAhead; ++i) {
      if (at + i * step < count) held[i] = __ldcs(from + at + i * step);
    }
#pragma unroll
    for (unsigned int i = 0; i < kAhead; ++i) {
      if (at + i * step < count) __stcs(to + at + i * step, held[i]);
    }
  }
}

__device__ inline void copy_piece(const Piece& piece, unsigned int lane, unsigned int lanes) {
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

// `lanes` threads take a piece; they divide a block's. The grid may be smaller than the list: its threads go on until all
// is copied. The next piece's words are loaded before the present one is copied.
template <typename List>
__device__ void gather(const List& list, const Launch& launch) {
  const unsigned int num_pieces = launch.num_pieces, lanes = launch.lanes, in_block = blockDim.x / lanes;
  const unsigned int total = num_pieces * (1 + launch.num_repeats);
  unsigned int index = blockIdx.x * in_block + threadIdx.x / lanes;
  if (index >= total) return;
  Piece next = piece_at(list, index, num_pieces);
#pragma unroll 1
  while (index < total) {
    const Piece piece = next;
    index += gridDim.x * in_block;
    if (index < total) next = piece_at(list, index, num_pieces);
    copy_piece(piece, threadIdx.x % lanes, lanes);
  }
}

extern "C" __launch_bounds__(128, 4) __global__ void kvlink_gather(const __grid_constant__ Launch launch) {
  if (launch.table != nullptr) {
    gather(Table{launch.table}, launch);
  } else {
    gather(Words{launch}, launch);
  }
}
