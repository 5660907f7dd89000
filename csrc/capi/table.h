// SPDX-License-Identifier: Apache-2.0
// The objects behind handles. A call that uses an object keeps it, so another thread may close its handle
// meanwhile.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/process_mark.h"
#include "capi/outcome.h"

namespace kvlink::capi {

enum class Kind : uint8_t { kRegion, kWorker, kPeer, kPlan, kOffer, kPull };

class Worker;

class Object {
 public:
  explicit Object(Kind kind, std::shared_ptr<Worker> worker = nullptr)
      : kind_(kind), worker_(std::move(worker)) {}
  virtual ~Object() = default;
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;

  Kind kind() const { return kind_; }
  const std::shared_ptr<Worker>& worker() const { return worker_; }  // that has it, or null
  /// Ends what the program must not see go on when the handle is closed. A failure leaves it open.
  virtual Outcome close() { return {}; }
  virtual std::string explain() const { return {}; }

 private:
  const Kind kind_;
  const std::shared_ptr<Worker> worker_;
};

/// Any thread.
class Table {
 public:
  /// That of this process, which lasts as long: threads may call while the process ends.
  static Table& get();
  /// Returns whether this process was forked from one that has a table. Nothing of it may be used then.
  static bool inherited();

  /// Returns a handle that is nobody's until put() or remove().
  kvl_handle reserve();
  /// Refuses an object whose worker was closed, and then the handle stays invalid.
  Outcome put(kvl_handle reserved, std::shared_ptr<Object> object);
  /// REQUIRES an object without a handle.
  Outcome add(std::shared_ptr<Object> object, kvl_handle& handle);
  /// Null if the handle is not, or no longer, that of an object.
  std::shared_ptr<Object> find(kvl_handle handle);
  /// The same for an object of one kind, whose class is T.
  template <typename T>
  std::shared_ptr<T> find(kvl_handle handle) {
    std::shared_ptr<Object> found = find(handle);
    if (!found || found->kind() != T::kKind) return nullptr;
    return std::static_pointer_cast<T>(std::move(found));
  }
  void remove(kvl_handle handle);
  /// Removes what the worker has. The objects end when the caller drops them.
  std::vector<std::shared_ptr<Object>> take_children(const Worker& worker);

 private:
  struct Entry {
    uint32_t generation = 1;
    std::shared_ptr<Object> object;
  };
  Entry* entry(kvl_handle handle);
  void drop(uint32_t index);

  const ProcessMark process_;
  std::mutex mutex_;
  std::vector<Entry> entries_;
  std::vector<uint32_t> free_;
};

}  // namespace kvlink::capi
