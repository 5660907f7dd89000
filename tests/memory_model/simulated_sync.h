// SPDX-License-Identifier: Apache-2.0
// The types of csrc/base/sync.h in the model of the lease table: every access to a word that several threads
// share is a step of the model, with the order that the product gives it.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <utility>

#include "memory.h"

namespace kvlink {

class Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  void lock() { memory_model::Run::the().lock(); }
  bool try_lock() { return lock(), true; }
  void unlock() {
    if (std::uncaught_exceptions() == 0) memory_model::Run::the().unlock();
  }
};

inline void full_fence() { memory_model::Run::the().fence(std::memory_order_seq_cst); }
inline void release_fence() { memory_model::Run::the().fence(std::memory_order_release); }

template <typename T>
class Atomic {
 public:
  Atomic() : value_{} {}
  Atomic(T value) : value_(value) {}  // NOLINT: as the standard one
  Atomic(const Atomic&) = delete;
  void operator=(const Atomic&) = delete;

  T load(std::memory_order order = std::memory_order_seq_cst) const {
    return is_private() ? value_ : static_cast<T>(run().load(this, order));
  }
  operator T() const { return load(); }  // NOLINT: as the standard one
  void store(T value, std::memory_order order = std::memory_order_seq_cst) {
    is_private() ? void(value_ = value) : run().store(this, static_cast<uint64_t>(value), order);
  }
  void operator=(T value) { store(value); }
  T exchange(T value, std::memory_order order = std::memory_order_seq_cst) {
    if (is_private()) return std::exchange(value_, value);
    return static_cast<T>(run().exchange(this, static_cast<uint64_t>(value), order));
  }

 private:
  static memory_model::Run& run() { return memory_model::Run::the(); }
  bool is_private() const { return !run().is_shared(this); }

  T value_;
};

}  // namespace kvlink
