// SPDX-License-Identifier: Apache-2.0
// Scattered pieces, each copied by one block of threads. Compiled at run time, see __init__.py.

// As csrc/cuda_gather.h fills it. Pieces of one launch do not overlap.
struct Piece {
  unsigned long long from, to;
  unsigned int bytes, unused;
};

// Threads of a block take neighbouring words, `kAhead` of them before the first is stored: loads from another GPU
// take a microsecond.
template <typename Word>
__device__ void copy(const Piece& piece) {
  constexpr unsigned int kAhead = 4;
  const Word* const from = reinterpret_cast<const Word*>(piece.from);
  Word* const to = reinterpret_cast<Word*>(piece.to);
  const unsigned int count = piece.bytes / sizeof(Word), step = blockDim.x;
  unsigned int at = threadIdx.x;
  for (; at + (kAhead - 1) * step < count; at += kAhead * step) {
    Word held[kAhead];
#pragma unroll
    for (unsigned int i = 0; i < kAhead; ++i) held[i] = __ldcs(from + at + i * step);
#pragma unroll
    for (unsigned int i = 0; i < kAhead; ++i) __stcs(to + at + i * step, held[i]);
  }
  for (; at < count; at += step) __stcs(to + at, __ldcs(from + at));
}

extern "C" __global__ void kvlink_gather(const Piece* pieces) {
  const Piece piece = pieces[blockIdx.x];
  const unsigned long long alignment = piece.from | piece.to | piece.bytes;
  if (alignment % 16 == 0) {
    copy<uint4>(piece);
  } else if (alignment % 8 == 0) {
    copy<uint2>(piece);
  } else if (alignment % 4 == 0) {
    copy<unsigned int>(piece);
  } else {
    copy<unsigned char>(piece);
  }
}
