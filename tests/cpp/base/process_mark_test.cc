// SPDX-License-Identifier: Apache-2.0
// What a forked child does with what its parent made.
#include "base/process_mark.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <memory>

#include "engine/engine.h"

namespace kvlink {
namespace {

/// Whether `holds` in a forked child.
bool in_child(const std::function<bool()>& holds) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(holds() ? 0 : 1);
  int status = 0;
  return ::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

struct Counted {
  explicit Counted(int* deleted) : deleted(deleted) {}
  ~Counted() { ++*deleted; }
  const ProcessMark& process() const { return mark; }

  int* deleted;
  ProcessMark mark = {};
};

TEST(ProcessMarkTest, AChildInheritsWhatItsParentMadeAndOwnsWhatItMakes) {
  const ProcessMark mark;
  EXPECT_FALSE(mark.inherited());
  EXPECT_TRUE(mark.check().ok());
  EXPECT_TRUE(in_child([&] {
    const ProcessMark own;
    return mark.inherited() && !own.inherited() && mark.check().code() == Code::kConfig &&
           in_child([&] { return mark.inherited() && own.inherited(); });
  }));
  EXPECT_FALSE(mark.inherited());
}

TEST(ProcessMarkTest, AChildLeavesWhatItInheritedAsItIs) {
  int deleted = 0;
  std::shared_ptr<Counted> object(new Counted(&deleted), DeleteOwn());
  EXPECT_TRUE(in_child([&] {
    object.reset();
    std::shared_ptr<Counted>(new Counted(&deleted), DeleteOwn()).reset();
    return deleted == 1;
  }));
  object.reset();
  EXPECT_EQ(deleted, 1);
}

TEST(ProcessMarkTest, AChildDoesNotWaitForTheThreadsOfAnEngine) {
  const auto memory = *HostMemory::allocate(4096, false);
  EngineOptions options;
  options.transports = {"tcp"};
  auto made = Engine::make(options);
  ASSERT_TRUE(made.ok());
  ASSERT_TRUE((*made)->add_pool_region(memory->range()).ok());
  ASSERT_TRUE((*made)->start().ok());
  std::shared_ptr<Engine> engine(made->release(), DeleteOwn());
  EXPECT_TRUE(in_child([&] {
    engine->close();  // would join them
    engine.reset();
    return true;
  }));
  EXPECT_TRUE(engine->grant(1, 1, 0, 1'000'000'000).ok());
}

}  // namespace
}  // namespace kvlink
