// SPDX-License-Identifier: Apache-2.0
// The reader's end of cuda. Posts of pool bytes are launched one behind the other on a stream. The CPU reads
// the lease slots, which are in host memory, after everything posted before has landed.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/poll_timer.h"
#include "device/gather.h"
#include "transport_api/transport.h"
#include "transports/cuda/mapping.h"
#include "transports/cuda/protocol.h"
#include "transports/same_host/fd_client.h"
#include "transports/same_host/remote_regions.h"
#include "transports/same_host/shared_mapping.h"

namespace kvlink {

class CudaEndpoint final : public Endpoint {
 public:
  /// `local_on_device` says which local regions are on the device; the others are in host memory.
  CudaEndpoint(FdClient client, std::shared_ptr<CudaGather> gather, std::shared_ptr<CudaTables> tables,
               std::vector<bool> local_on_device)
      : client_(std::move(client)),
        gather_(std::move(gather)),
        tables_(std::move(tables)),
        local_on_device_(std::move(local_on_device)) {}
  ~CudaEndpoint() override { close(); }

  std::string hello() const override { return client_.hello(); }
  Status establish(std::string_view reply, const Patience& patience) override;
  Result<uint32_t> import_region(std::string_view remote_key) override;

  const Traits& traits() const override { return traits_; }
  Status post_read(uint64_t token, const Chunk& chunk) override;
  Status post_write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value) override;
  PollResult poll(int64_t now_ns, bool waiting, std::vector<Completion>& ended) override;
  bool cancel(uint64_t token) override;
  bool arm() override;
  void close() override;

 private:
  // Each wait is an eighth longer than the one before, so the end is noticed after at most a ninth of the
  // copy's time.
  static constexpr int64_t kFirstLookNs = 5'000, kLastLookNs = 160'000, kLongerBy = 1;

  /// One table of pieces that is under way.
  struct Launch {
    uint64_t number;
    CudaTables::Held table;
  };
  struct Post {
    uint64_t token = 0;
    Chunk chunk = {};    // of no operations: a write
    uint64_t bytes = 0;  // without repeats
    bool on_device = false;
    CountingCursor at = {};  // on_device: what is not launched yet
    std::deque<Launch> launched = {};
    uint32_t region = 0;
    uint64_t offset = 0, value = 0;
    bool unlaunched() const { return on_device && at.moved < bytes; }
  };

  Result<uint32_t> import_host(const CudaKey& key);
  Status check_kind(const Chunk& chunk, bool on_device) const;
  bool can_launch() const;
  bool launch_all();
  Status launch(Post& post, CudaTables::Held table);
  GatherList fill(Post& post, CudaTables::Table& table) const;
  Result<bool> ended(Post& post);
  void execute(const Post& post);
  void break_down(Status why);
  void notice_owner(int64_t now_ns);
  void check_owner();

  FdClient client_;
  const std::shared_ptr<CudaGather> gather_;
  const std::shared_ptr<CudaTables> tables_;
  const std::vector<bool> local_on_device_;
  std::unique_ptr<cuda::MarkedStream> stream_;
  Traits traits_;
  PollTimer look_{kFirstLookNs, kLastLookNs, kLongerBy};

  Remotes remotes_;
  std::vector<bool> remote_on_device_;  // by region
  std::vector<std::unique_ptr<CudaMapping>> mappings_;
  GatherLink link_ = GatherLink::kSameGpu;
  bool owner_may_free_ = false;  // some mapping's memory
  std::vector<MemfdMapping> host_mappings_;
  std::deque<Post> posts_;
  bool starved_ = false;  // there was no free table
  Status broken_;
  Interval owner_checks_{kCheckOwnerNs};
};

}  // namespace kvlink
