// SPDX-License-Identifier: Apache-2.0
#include "transports/same_host/copy_helper.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <thread>
#include <vector>

namespace kvlink::testing {
namespace {

constexpr uint32_t kParts = 32;

/// Counts, without atomics, how often each part is copied: two threads that copy one part are a race.
struct Work {
  std::array<uint32_t, kParts> copied{};
  static void copy(void* self, uint32_t part) {
    uint32_t& count = static_cast<Work*>(self)->copied[part];
    for (int i = 0; i < 200; ++i) asm volatile("" : : "r"(&count) : "memory");
    ++count;
  }
};

TEST(CopyHelper, CopiesEachPartOnceBeforeItReturns) {
  CopyHelper helper;
  for (uint32_t round = 0; round < 3000; ++round) {
    Work work;
    const uint32_t parts = round % (kParts + 1);
    helper.run(&Work::copy, &work, parts);
    for (uint32_t part = 0; part < kParts; ++part) ASSERT_EQ(work.copied[part], part < parts ? 1u : 0u);
  }
}

TEST(CopyHelper, WorksForOneCallerAndTheOthersWorkAlone) {
  CopyHelper helper;
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&helper] {
      for (int round = 0; round < 1000; ++round) {
        Work work;
        helper.run(&Work::copy, &work, kParts);
        for (const uint32_t copied : work.copied) EXPECT_EQ(copied, 1u);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(CopyHelper, LeavesItsWorkToTheCallerOnceStopped) {
  CopyHelper helper;
  for (int round = 0; round < 3; ++round) {
    Work work;
    helper.run(&Work::copy, &work, kParts);
    for (const uint32_t copied : work.copied) EXPECT_EQ(copied, 1u);
    helper.stop();
    helper.stop();
  }
}

TEST(CopyHelper, AForkedChildIsNotHeldUpByTheThreadThatItLacks) {
  auto helper = std::make_unique<CopyHelper>();
  Work work;
  helper->run(&Work::copy, &work, kParts);
  const pid_t child = ::fork();
  if (child == 0) {
    helper.reset();
    ::_exit(7);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

}  // namespace
}  // namespace kvlink::testing
