// SPDX-License-Identifier: Apache-2.0
// A device that stands for a GPU. No CPU can follow its addresses: who does ends the test. Copies are made by
// a thread of its own, late, and in no order.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "device/device_copier.h"
#include "memory/host_memory.h"

namespace kvlink::testing {

class FakeDevice : public DeviceCopier {
 public:
  explicit FakeDevice(uint64_t bytes)
      : memory_(*HostMemory::allocate(bytes, false)),
        address_(
            static_cast<std::byte*>(::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))),
        copying_([this] { run(); }) {}
  ~FakeDevice() override {
    {
      std::lock_guard lock(mutex_);
      ended_ = true;
      changed_.notify_all();
    }
    copying_.join();
    ::munmap(address_, memory_->range().bytes);
  }

  /// The kinds of memory of a pool.
  MemoryRange range() const { return {.base = address_, .bytes = memory_->range().bytes, .device = true}; }
  std::byte* at(uint64_t offset) const { return address_ + offset; }
  /// Returns the device's bytes at `address`, for the test.
  std::byte* behind(const std::byte* address) const { return memory_->range().base + (address - address_); }
  void fill(std::byte value) {
    std::lock_guard lock(mutex_);
    std::memset(memory_->range().base, static_cast<int>(value), memory_->range().bytes);
  }
  std::vector<std::byte> contents() {
    std::lock_guard lock(mutex_);
    const MemoryRange range = memory_->range();
    return {range.base, range.base + range.bytes};
  }

  /// Nothing is copied until go_on().
  void stall() { set(stalled_, true); }
  void go_on() { set(stalled_, false); }
  /// Refuses to copy from now on.
  void break_down() { set(broken_, true); }
  uint64_t pinned_bytes() const { return pinned_.bytes; }
  size_t num_under_way() {
    std::lock_guard lock(mutex_);
    return jobs_.size();
  }
  uint64_t num_copied() {
    std::lock_guard lock(mutex_);
    return num_copied_;
  }
  /// Until somebody waits for the end of copies.
  void await_drain() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return draining_; });
  }

  Status pin(std::byte* host, uint64_t bytes) override {
    EXPECT_EQ(pinned_.bytes, 0u) << "pinned twice";
    pinned_ = {.base = host, .bytes = bytes};
    return {};
  }
  Result<std::unique_ptr<CopyQueue>> open_queue() override {
    return std::unique_ptr<CopyQueue>(std::make_unique<Queue>(*this));
  }
  /// As EngineOptions take it. The test keeps the device.
  MakeDeviceCopier maker() {
    return [this](const std::byte* memory) -> Result<std::shared_ptr<DeviceCopier>> {
      EXPECT_EQ(memory, address_);
      return std::shared_ptr<DeviceCopier>(std::shared_ptr<void>(), this);
    };
  }

 private:
  struct Job {
    const void* queue;
    uint64_t number;
    CopyTo to;
    std::vector<CopyPiece> pieces;
  };

  class Queue final : public CopyQueue {
   public:
    explicit Queue(FakeDevice& device) : device_(device) {}
    ~Queue() override { drain(); }
    Result<uint64_t> start(CopyTo to, std::span<const CopyPiece> pieces) override {
      std::lock_guard lock(device_.mutex_);
      if (device_.broken_) return Status::Unavailable("the device is lost", "reset it");
      for (const CopyPiece& piece : pieces) device_.expect_inside(piece);
      device_.jobs_.push_back({this, ++last_, to, {pieces.begin(), pieces.end()}});
      device_.changed_.notify_all();
      return last_;
    }
    Result<bool> done(uint64_t number) override {
      std::lock_guard lock(device_.mutex_);
      if (device_.broken_) return Status::Unavailable("the device is lost", "reset it");
      EXPECT_LE(number, last_);
      return !device_.has(this, number);
    }
    void drain() override {
      std::unique_lock lock(device_.mutex_);
      device_.draining_ = true;
      device_.changed_.notify_all();
      device_.changed_.wait(lock, [this] { return device_.broken_ || !device_.has(this, 0); });
      device_.draining_ = false;
    }

   private:
    FakeDevice& device_;
    uint64_t last_ = 0;
  };

  void set(bool& flag, bool value) {
    std::lock_guard lock(mutex_);
    flag = value;
    if (broken_) jobs_.clear();
    changed_.notify_all();
  }
  /// Number 0: any.
  bool has(const void* queue, uint64_t number) const {
    return std::any_of(jobs_.begin(), jobs_.end(), [&](const Job& job) {
      return job.queue == queue && (number == 0 || job.number == number);
    });
  }
  void expect_inside(const CopyPiece& piece) const {
    const MemoryRange own = range();
    EXPECT_GT(piece.bytes, 0u);
    EXPECT_TRUE(own.base <= piece.device && piece.device + piece.bytes <= own.base + own.bytes);
    EXPECT_TRUE(pinned_.base <= piece.slot && piece.slot + piece.bytes <= pinned_.base + pinned_.bytes);
  }
  void run() {
    std::mt19937_64 random(1);
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return ended_ || (!stalled_ && !jobs_.empty()); });
      if (ended_) return;
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 60));
      lock.lock();
      if (stalled_ || jobs_.empty()) continue;
      const auto job = jobs_.begin() + static_cast<ptrdiff_t>(random() % jobs_.size());
      for (const CopyPiece& piece : job->pieces) {
        std::byte* const own = behind(piece.device);
        job->to == CopyTo::kDevice ? std::memcpy(own, piece.slot, piece.bytes)
                                   : std::memcpy(piece.slot, own, piece.bytes);
        num_copied_ += piece.bytes;
      }
      jobs_.erase(job);
      changed_.notify_all();
    }
  }

  const std::shared_ptr<HostMemory> memory_;
  std::byte* const address_;
  MemoryRange pinned_;
  std::mutex mutex_;  // guards everything below, and the memory while copies run
  std::condition_variable changed_;
  std::vector<Job> jobs_;
  uint64_t num_copied_ = 0;
  bool stalled_ = false, broken_ = false, ended_ = false, draining_ = false;
  std::thread copying_;
};

}  // namespace kvlink::testing
