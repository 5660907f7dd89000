// SPDX-License-Identifier: Apache-2.0
// A second thread that copies. On idle cores two threads copy out of another process in 0.5 to 0.65 of the
// time of one, with as much CPU time; on busy ones the caller does not wait for the second to be scheduled.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

#include "base/process_mark.h"
#include "transports/same_host/sharing_policy.h"

namespace kvlink {

/// Any thread, but for stop(). The thread starts with the first work, and sleeps without any.
class CopyHelper {
 public:
  CopyHelper() = default;
  ~CopyHelper() { stop(); }
  CopyHelper(const CopyHelper&) = delete;
  CopyHelper& operator=(const CopyHelper&) = delete;

  /// Copies one part. It is called once for each part, by two threads at a time, and must not throw.
  using CopyPart = void (*)(void* context, uint32_t part);

  /// Copies the parts 0…num_parts-1 and returns when all are copied. The parts that the helper has not begun
  /// are the caller's, so nobody waits for more than one of them. Everything that was copied happens before
  /// the return. `alone_ns`: about what all parts take one thread.
  void run(CopyPart copy, void* context, uint32_t num_parts, int64_t alone_ns);

  /// Ends the thread. Later work is the caller's alone. Idempotent. REQUIRES that no other thread is in
  /// run().
  void stop();

 private:
  enum State : uint32_t { kIdle, kPosted, kJoined, kStopping };

  bool starts(int64_t alone_ns);
  void serve();
  uint32_t copy_parts();
  void wait_for_helper();
  void learn(uint32_t num_parts, int64_t began, int64_t worked_ns, int64_t waited_ns);

  const ProcessMark process_;
  std::atomic<bool> taken_ = false;  // by the caller that it works for
  std::atomic<uint32_t> state_ = kIdle;
  std::atomic<uint32_t> next_part_ = 0;
  std::atomic<uint32_t> num_helped_ = 0;
  std::atomic<int64_t> joined_ns_ = 0;  // when the helper began; 0: it did not
  // These describe the work. They are written before kPosted and read after kJoined.
  CopyPart copy_ = nullptr;
  void* context_ = nullptr;
  uint32_t num_parts_ = 0;
  // These belong to the caller that has taken it.
  SharingPolicy policy_;
  bool is_alone_ = false;  // one core, or the thread does not start
  std::thread thread_;
};

}  // namespace kvlink
