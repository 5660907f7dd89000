// SPDX-License-Identifier: Apache-2.0
// Shared memory of a machine with weak ordering, as a value. Each location keeps the values that were stored
// to it, and a load takes any that its thread has not yet seen to be outdated. What a thread has seen is its
// view, which release and acquire, locks and fences hand on. A load never takes a value that is stored later.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace kvlink::memory_model {

constexpr size_t kMostLocations = 16, kMostThreads = 5;
using View = std::array<uint8_t, kMostLocations>;  // by location: the oldest value that may still be read
void join(View& into, const View& other);

struct Thread {
  View now{}, acquirable{}, released{};  // by loads; by the next acquire fence; by the last release fence
  uint32_t loads = 0;                    // locations that it may still load
};

class Memory {
 public:
  explicit Memory(size_t num_locations = 0) : locations_(num_locations, {{0, {}}}) {}

  Thread& thread(size_t index) { return threads_[index]; }
  uint64_t latest(size_t location) const { return locations_[location].back().value; }
  /// Returns how many values a load may take.
  size_t num_candidates(size_t thread, size_t location, std::memory_order order) const;
  /// `choice` 0 is the latest value.
  uint64_t load(size_t thread, size_t location, std::memory_order order, size_t choice);
  void store(size_t thread, size_t location, uint64_t value, std::memory_order order);
  uint64_t exchange(size_t thread, size_t location, uint64_t value, std::memory_order order);
  void fence(size_t thread, std::memory_order order);
  /// The lock of the table, and another by which reported leases change threads.
  void lock(size_t thread, size_t which) { join(threads_[thread].now, locks_[which]); }
  void unlock(size_t thread, size_t which) { join(locks_[which], threads_[thread].now); }
  /// One thread hands something to another, and orders what it did before.
  void hand(size_t from, size_t to) { join(threads_[to].now, threads_[from].now); }

  /// Drops values that nobody can load any more, so that equal futures have equal states.
  void tidy();
  void add_to(std::string& key) const;

 private:
  struct Value {
    uint64_t value;
    View view;  // of who acquires it
  };
  size_t first_of(size_t thread, size_t location, std::memory_order order) const;
  template <typename Change>
  void for_each_view(Change change);

  std::vector<std::vector<Value>> locations_;
  std::array<Thread, kMostThreads> threads_;
  std::array<View, 2> locks_{};
  View sequential_{};  // what sequentially consistent accesses and fences have seen
};

/// Thrown out of a call of the table at the next access that other threads can observe.
struct Paused {};

/// The steps of a call that a thread has made so far. Calls start over with what they loaded.
using Log = std::vector<uint64_t>;

/// Runs one step of a thread: the accesses that it logged, then one more that others can observe.
class Run {
 public:
  static Run& the();
  /// Accesses to other memory than this are private to the table.
  void share(const void* at, size_t location) { shared_[at] = location; }
  bool is_shared(const void* at) const { return shared_.contains(at); }
  void forget() { shared_.clear(); }
  /// Called before a store, with the value that it replaces.
  void on_store(std::function<void(size_t location, uint64_t before, uint64_t after)> call) {
    on_store_ = std::move(call);
  }
  /// Locations that one side alone stores to: loads of them by that side cannot be observed.
  void own(uint32_t locations) { owned_ = locations; }

  /// Until the end of the call or the next access. `choice`: which value a load takes. Returns whether the
  /// call has ended.
  bool step(Memory& memory, size_t thread, Log& log, size_t choice, const std::function<void()>& call);
  /// How many choices the load of the last step had.
  size_t num_choices() const { return num_choices_; }
  /// All at once, with the latest values.
  void at_once(Memory& memory, size_t thread, const std::function<void()>& call);
  /// Accesses change nothing: the state of a table is saved or restored.
  void silently(const Memory& memory, const std::function<void()>& call);

  uint64_t load(const void* at, std::memory_order order);
  void store(const void* at, uint64_t value, std::memory_order order);
  uint64_t exchange(const void* at, uint64_t value, std::memory_order order);
  void fence(std::memory_order order);
  void lock();
  void unlock();

 private:
  enum class Mode : uint8_t { kIdle, kStep, kAtOnce, kSilent };
  template <typename Access>
  uint64_t access(bool observable, Access access);

  std::map<const void*, size_t> shared_;
  std::function<void(size_t, uint64_t, uint64_t)> on_store_;
  uint32_t owned_ = 0;
  Mode mode_ = Mode::kIdle;
  Memory* memory_ = nullptr;
  const Memory* silent_ = nullptr;
  size_t thread_ = 0, at_ = 0, choice_ = 0, num_choices_ = 1;
  Log* log_ = nullptr;
  bool stepped_ = false;
};

}  // namespace kvlink::memory_model
