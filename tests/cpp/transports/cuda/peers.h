// SPDX-License-Identifier: Apache-2.0
// Owners and readers whose pools are in the memory of the GPU that tests/fake_cuda stands for.
#pragma once

#include <dlfcn.h>

#include <cstdlib>
#include <optional>
#include <string>

#include "cpp/device/fake_kernel.h"
#include "cpp/transports/copy_peers.h"
#include "device/cuda_memory.h"

namespace kvlink::testing {

inline constexpr uint64_t kGpuBit = uint64_t{1} << 60;  // as tests/fake_cuda/fake.h has it
inline constexpr uint32_t kScratch = 1;                 // the local region behind the pool, in host memory

/// Where the CPU finds what a GPU address stands for.
inline std::byte* behind(const std::byte* on_gpu) {
  return reinterpret_cast<std::byte*>(reinterpret_cast<uint64_t>(on_gpu) & ~kGpuBit);
}

/// The stand-in, opened before anyone looks for "libcuda.so.1": that name is its own.
template <typename Function>
Function* from_fake_cuda(const char* name) {
  static void* const library = ::dlopen(KVLINK_FAKE_CUDA, RTLD_NOW);
  EXPECT_NE(library, nullptr) << ::dlerror();
  return reinterpret_cast<Function*>(::dlsym(library, name));
}

/// An environment variable for as long as it lives. Null: without it.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* const found = std::getenv(name)) before_ = found;
    set(value);
  }
  ~Variable() { set(before_ ? before_->c_str() : nullptr); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  void set(const char* value) { value ? ::setenv(name_, value, 1) : ::unsetenv(name_); }
  const char* const name_;
  std::optional<std::string> before_;
};

/// GPU memory that kvlink allocates, or by cuMemAlloc, as cudaMalloc does, or in two allocations that only
/// the fabric shares, as torch's expandable segments do.
class GpuPool {
 public:
  enum class Kind { kKvlink, kMalloc, kFabric };

  explicit GpuPool(Kind kind = Kind::kKvlink, uint64_t bytes = kPoolBytes) : device_(*cuda::Device::at(0)) {
    if (kind == Kind::kKvlink) {
      auto made = CudaMemory::allocate(bytes, 0);
      EXPECT_TRUE(made.ok()) << made.status().what();
      memory_ = *made;
      range_ = memory_->range();
      return;
    }
    const cuda::Current current(*device_);
    if (kind == Kind::kFabric) {
      map_halves(bytes / 2);
    } else {
      EXPECT_EQ(device_->api.memory_alloc(&malloced_, bytes), 0);
    }
    const cuda::Address at = half_ != 0 ? mapped_ : malloced_;
    range_ = {.base = reinterpret_cast<std::byte*>(at), .bytes = bytes, .device = true};
  }
  ~GpuPool() {
    free();
    const cuda::Current current(*device_);
    if (half_ == 0) return;
    for (const cuda::Address at : {mapped_, mapped_ + half_}) device_->api.memory_unmap(at, half_);
    device_->api.address_free(mapped_, 2 * half_);
  }
  GpuPool(const GpuPool&) = delete;
  GpuPool& operator=(const GpuPool&) = delete;

  /// Frees what cuMemAlloc made.
  void free() {
    const cuda::Current current(*device_);
    if (const cuda::Address at = std::exchange(malloced_, 0); at != 0) device_->api.memory_free(at);
  }
  MemoryRange range() const { return range_; }
  std::byte* bytes() const { return behind(range_.base); }
  void fill(uint64_t seed) {
    MemoryRange seen = range_;
    seen.base = bytes();
    fill_random(seen, seed);
  }

 private:
  void map_halves(uint64_t half) {
    const cuda::Api& api = device_->api;
    half_ = half;
    EXPECT_EQ(api.address_reserve(&mapped_, 2 * half, 0, 0, 0), 0);
    cuda::AllocationProperties wanted{};
    wanted.type = cuda::kPinnedAllocation;
    wanted.handle_types = cuda::kFabric;
    wanted.location = {cuda::kOnDevice, 0};
    for (const cuda::Address at : {mapped_, mapped_ + half}) {
      cuda::Allocation allocation = 0;
      EXPECT_EQ(api.allocation_create(&allocation, half, &wanted, 0), 0);
      EXPECT_EQ(api.memory_map(at, half, 0, allocation, 0), 0);
      api.allocation_release(allocation);
    }
    const cuda::AccessDescription access{wanted.location, cuda::kReadWrite};
    EXPECT_EQ(api.memory_set_access(mapped_, 2 * half, &access, 1), 0);
  }

  const std::shared_ptr<const cuda::Device> device_;
  std::shared_ptr<CudaMemory> memory_;
  cuda::Address malloced_ = 0, mapped_ = 0;
  uint64_t half_ = 0;
  MemoryRange range_;
};

/// Exports a pool of random bytes and a zeroed table.
struct GpuOwner {
  explicit GpuOwner(GpuPool::Kind kind = GpuPool::Kind::kKvlink)
      : pool(kind), table(allocate(kTableBytes)), words(allocate_words()) {
    pool.fill(1);
    transport = std::move(*make_transport("cuda", {}));
    auto exported_pool = transport->register_memory(pool.range(), Access::kRead);
    auto exported_table = transport->register_memory(table->range(), Access::kReadWords);
    auto exported_words = transport->register_memory(words->range(), Access::kWriteWords);
    EXPECT_TRUE(exported_pool.ok()) << exported_pool.status().what();
    EXPECT_TRUE(exported_table.ok()) << exported_table.status().what();
    pool_region = std::move(*exported_pool);
    EXPECT_TRUE(exported_words.ok()) << exported_words.status().what();
    table_region = std::move(*exported_table);
    words_region = std::move(*exported_words);
  }
  Card card() const {
    return {transport->address(), pool_region->remote_key(), table_region->remote_key(),
            words_region->remote_key()};
  }

  GpuPool pool;
  std::shared_ptr<HostMemory> table, words;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<MemoryRegion> pool_region, table_region, words_region;
};

/// A connected endpoint, with a poisoned pool to read into. `image`: with it the kernel copies, for the
/// driver's batches fail while both are compared.
class GpuReader {
 public:
  explicit GpuReader(const std::string& image = "fake image", uint32_t gpu_blocks = 0) {
    TransportOptions options;
    options.cuda_kernel = fake_kernel(image);
    options.gpu_blocks = gpu_blocks;
    const Variable kernel_alone("FAKE_CUDA_NO_BATCH", "1");
    transport = std::move(*make_transport("cuda", options));
    // Its own pool need not be exported.
    [[maybe_unused]] const auto region = transport->register_memory(pool.range(), Access::kRead);
    poison();
  }

  Status connect(const Card& card, const Reader::Accept& accept) {
    const Variable kernel_alone("FAKE_CUDA_NO_BATCH", "1");
    auto opened = open_one(*transport, card.address);
    if (!opened.ok()) return opened.status();
    endpoint = std::move(*opened);
    Status status = endpoint->establish(accept(endpoint->hello()), 20 * kSecondNs);
    for (const std::string& key : {card.pool_key, card.table_key, card.words_key}) {
      if (status.ok()) status = endpoint->import_region(key).status();
    }
    return status;
  }
  Status wait(uint64_t token) { return wait_for(*endpoint, token); }
  Status read(const Scatter& scatter, uint64_t token = 7) {
    Status status = endpoint->post_read(token, scatter.chunk());
    return status.ok() ? wait(token) : status;
  }
  std::byte* at(uint64_t offset) const { return pool.range().base + offset; }
  void poison() { std::fill(pool.bytes(), pool.bytes() + kPoolBytes, kPoison); }

  GpuPool pool;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<Endpoint> endpoint;
};

}  // namespace kvlink::testing
