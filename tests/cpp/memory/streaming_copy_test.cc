// SPDX-License-Identifier: Apache-2.0
// Shared memory and the copies between mappings.
#include "memory/streaming_copy.h"

#include <fcntl.h>
#include <sys/mman.h>

#include "cpp/transports/copy_peers.h"

namespace kvlink::testing {
namespace {

TEST(HostMemory, IsZeroAndSealed) {
  auto memory = allocate(3 << 20);
  const MemoryRange range = memory->range();
  EXPECT_TRUE(
      std::all_of(range.base, range.base + range.bytes, [](std::byte byte) { return byte == std::byte{0}; }));
  EXPECT_NE(::ftruncate(range.memfd, 4096), 0);
  EXPECT_NE(::ftruncate(range.memfd, 4 << 20), 0);
}

/// Whoever has the descriptor: the owner's mapping stays writable, others are so only where peers write.
TEST(HostMemory, IsWritableToOthersOnlyWherePeersWrite) {
  for (const Access exported_for : {Access::kRead, Access::kReadWords, Access::kWriteWords}) {
    const auto memory = *HostMemory::allocate(4096, false, {}, exported_for);
    const MemoryRange range = memory->range();
    range.base[0] = std::byte{7};
    void* const other = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, range.memfd, 0);
    EXPECT_EQ(other != MAP_FAILED, exported_for == Access::kWriteWords);
    if (other != MAP_FAILED) ::munmap(other, 4096);
    void* const reading = ::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, range.memfd, 0);
    ASSERT_NE(reading, MAP_FAILED);
    EXPECT_EQ(*static_cast<std::byte*>(reading), std::byte{7});
    ::munmap(reading, 4096);
    EXPECT_NE(::fcntl(range.memfd, F_ADD_SEALS, F_SEAL_WRITE), 0) << "no more seals";
  }
}

TEST(HostMemory, SaysWhatItCouldNotAllocate) {
  EXPECT_EQ(HostMemory::allocate(0, true).status().code(), Code::kConfig);
  const Status status = HostMemory::allocate(uint64_t{1} << 50, false).status();
  EXPECT_EQ(status.code(), Code::kConfig);
  EXPECT_NE(status.what().find("1125899906842624 bytes"), std::string::npos) << status.what();
  EXPECT_NE(status.what().find("available"), std::string::npos);
}

TEST(StreamCopy, CopiesEverySizeAndAlignment) {
  std::mt19937_64 random(5);
  std::vector<std::byte> from(1 << 18), to(1 << 18);
  for (std::byte& byte : from) byte = static_cast<std::byte>(random());
  for (int round = 0; round < 300; ++round) {
    std::fill(to.begin(), to.end(), kPoison);
    std::vector<std::byte> expected = to;
    StreamCopy copy;
    for (size_t at = random() % 70; at < to.size();) {
      const size_t bytes = std::min<size_t>(random() % (round % 2 == 0 ? 300 : 20'000), to.size() - at);
      const size_t source = random() % (from.size() - bytes + 1);
      copy.add(to.data() + at, from.data() + source, bytes);
      std::copy_n(from.begin() + static_cast<ptrdiff_t>(source), bytes,
                  expected.begin() + static_cast<ptrdiff_t>(at));
      at += bytes + random() % 3;
    }
    copy.finish();
    ASSERT_TRUE(to == expected);
  }
}

}  // namespace
}  // namespace kvlink::testing
