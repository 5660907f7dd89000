// SPDX-License-Identifier: Apache-2.0
#include "verbs_memory.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <future>

namespace kvlink::verbs {
namespace {

constexpr uint64_t kLargestPageBytes = uint64_t{1} << 30;

constexpr size_t kAtATime = 8;  // slices of one NIC; pinning scales with cores until memory is the limit

// The order of stores does not matter to bytes that count only once their completion is polled.
int access_flags(Rights rights) {
  switch (rights) {
    case Rights::kLocal:
      return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING;
    case Rights::kPeersRead:
      return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_RELAXED_ORDERING;
    case Rights::kPeersReadWrite:
      return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
  }
  return 0;
}

/// iWARP writes what was read as it writes all else: where the network may. Such a key is shown only to the
/// owner that is read from, while it is.
constexpr int kSinkFlags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

Status refused(const Nic& nic, const MemoryRange& range, uint64_t bytes, int error) {
  std::string fix;
  if (range.dmabuf_fd >= 0) {
    fix =
        "exporting GPU memory needs rdma-core 34, Linux 5.12 and a NIC driver with dma-buf support; see "
        "kvlink doctor --gpudirect";
  } else if (error == ENOMEM || error == EPERM || error == EAGAIN) {
    fix =
        "raise the locked memory limit (ulimit -l unlimited; LimitMEMLOCK=infinity for a service; --ulimit "
        "memlock=-1 for a container)";
  } else if (error == EFAULT || error == EINVAL) {
    fix = "is this GPU memory? then load nvidia-peermem or lend it by dma-buf; see kvlink doctor --gpudirect";
  }
  return Status::Unavailable(
      nic.name() + " cannot register " + std::to_string(bytes) + " bytes: " + std::strerror(error), fix);
}

/// Runs `one(0)`…`one(count - 1)` side by side, or in turn when that does not pay; the first refusal.
template <typename One>
Status each(size_t count, bool large, One one) {
  std::vector<std::future<Status>> running;
  for (size_t number = 0; number < count; ++number) {
    running.push_back(std::async(large ? std::launch::async : std::launch::deferred, one, number));
  }
  Status result;
  for (auto& its : running) {
    if (Status status = its.get(); result.ok()) result = std::move(status);
  }
  return result;
}

std::vector<uint32_t> keys(const std::vector<Owned<ibv_mr>>& slices, uint32_t ibv_mr::* key) {
  std::vector<uint32_t> all;
  for (const auto& slice : slices) all.push_back(slice.get()->*key);
  return all;
}

}  // namespace

Result<std::shared_ptr<const Memory>> Memory::enlist(std::span<const std::shared_ptr<Nic>> nics,
                                                     const MemoryRange& range, Rights rights) {
  const std::shared_ptr<Memory> memory(new Memory(range));
  memory->nics_.assign(nics.begin(), nics.end());
  memory->slices_.resize(nics.size());
  memory->sinks_.resize(nics.size());
  const int access = access_flags(rights);
  // Pinning is most of the work, and the kernel does it for several NICs and slices at a time.
  const Status status = each(nics.size(), range.bytes > kSliceBytes, [&memory, access](size_t nic) {
    const std::shared_ptr<Nic>& at = memory->nics_[nic];
    Status status = memory->enlist_at(at, access, memory->slices_[nic]);
    if (!status.ok() || !at->iwarp()) return status;
    return memory->enlist_at(at, kSinkFlags, memory->sinks_[nic]);
  });
  if (!status.ok()) return status;
  return std::shared_ptr<const Memory>(memory);
}

Status Memory::enlist_at(const std::shared_ptr<Nic>& nic, int access,
                         std::vector<Owned<ibv_mr>>& slices) const {
  const size_t count = (range_.bytes + kSliceBytes - 1) / kSliceBytes;
  for (size_t slice = 0; slice < count; ++slice) slices.emplace_back(nullptr, nic->api().dereg_mr);
  const size_t parts = std::min(count, kAtATime);
  return each(parts, parts > 1, [&](size_t part) {
    for (size_t slice = part; slice < count; slice += parts) {
      const uint64_t at = slice * kSliceBytes;
      const uint64_t bytes = std::min(range_.bytes - at, kSliceBytes);
      slices[slice].reset(nic->register_memory(range_, at, bytes, iova() + at, access));
      if (!slices[slice]) return refused(*nic, range_, bytes, errno);
    }
    return Status{};
  });
}

uint64_t Memory::iova() const { return reinterpret_cast<uintptr_t>(range_.base) % kLargestPageBytes; }

std::vector<uint32_t> Memory::lkeys(size_t nic) const {
  return keys(sinks_[nic].empty() ? slices_[nic] : sinks_[nic], &ibv_mr::lkey);
}
std::vector<uint32_t> Memory::rkeys(size_t nic) const { return keys(slices_[nic], &ibv_mr::rkey); }

}  // namespace kvlink::verbs
