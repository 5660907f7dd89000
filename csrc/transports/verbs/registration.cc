// SPDX-License-Identifier: Apache-2.0
#include "transports/verbs/registration.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <future>

namespace kvlink::verbs {
namespace {

constexpr uint64_t kLargestPageBytes = uint64_t{1} << 30;

constexpr size_t kAtATime = 8;  // slices of one NIC; pinning scales with cores until memory is the limit

// The order of accesses does not matter to bytes that are used only after their completion. It matters to
// words, because a slot is read behind the data that it vouches for.
int access_flags(Rights rights) {
  switch (rights) {
    case Rights::kLocal:
      return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING;
    case Rights::kPeersRead:
      return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_RELAXED_ORDERING;
    case Rights::kPeersReadWords:
      return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
    case Rights::kPeersWriteWords:
      return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  }
  return 0;
}

/// iWARP writes read data like any other, to memory that the network may write. Only the owner that is read
/// from sees such a key, during the read.
constexpr int kSinkFlags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

Status refused(const Nic& nic, const MemoryRange& range, uint64_t bytes, int error) {
  std::string fix;
  if (!range.dmabuf_fds.empty()) {
    fix =
        "exporting GPU memory needs rdma-core 34, Linux 5.12 and a NIC driver with dma-buf support; see "
        "kvlink doctor --gpudirect";
  } else if (error == ENOMEM || error == EPERM || error == EAGAIN) {
    fix =
        "raise the locked memory limit (ulimit -l unlimited; LimitMEMLOCK=infinity for a service; --ulimit "
        "memlock=-1 for a container)";
  } else if (error == EFAULT || error == EINVAL) {
    fix =
        "is this GPU memory? then load nvidia-peermem or export it as a dma-buf; see kvlink doctor "
        "--gpudirect";
  }
  return Status::Unavailable(
      nic.name() + " cannot register " + std::to_string(bytes) + " bytes: " + std::strerror(error), fix);
}

/// Runs `one(0)` to `one(count - 1)` in parallel, or in turn if that pays more. Returns the first refusal.
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

uint64_t iova_of(const MemoryRange& range) {
  return reinterpret_cast<uintptr_t>(range.base) % kLargestPageBytes;
}

Result<std::vector<std::shared_ptr<const Memory>>> Memory::register_everywhere(
    std::span<const std::shared_ptr<Nic>> nics, const MemoryRange& range, Rights rights) {
  std::vector<std::shared_ptr<Memory>> made;
  for (const auto& nic : nics) made.emplace_back(new Memory(nic, range));
  // Pinning is most of the work, and the kernel can pin for several NICs and slices at a time.
  const Status status = each(made.size(), range.bytes > kSliceBytes,
                             [&made, rights](size_t nic) { return made[nic]->register_everywhere(rights); });
  if (!status.ok()) return status;
  return std::vector<std::shared_ptr<const Memory>>(made.begin(), made.end());
}

/// Only peers read through a NIC's own function beside the GPU. What landed through it might not be visible
/// to the GPU after its completion, which takes the way through the CPU, and CUDA has no flush for it.
Status Memory::register_everywhere(Rights rights) {
  if (rights == Rights::kPeersRead && register_directly()) {
    return register_everywhere(access_flags(Rights::kLocal), sinks_);
  }
  Status status = register_everywhere(access_flags(rights), slices_);
  if (!status.ok() || !nic_->iwarp()) return status;
  return register_everywhere(kSinkFlags, sinks_);
}

Status Memory::register_everywhere(int access, std::vector<Owned<ibv_mr>>& slices) const {
  const size_t count = (range_.bytes + kSliceBytes - 1) / kSliceBytes;
  if (!range_.dmabuf_fds.empty() && range_.dmabuf_fds.size() != count) {
    return Status::Config("device memory of " + std::to_string(range_.bytes) + " bytes needs " +
                          std::to_string(count) + " dma-bufs, and has " +
                          std::to_string(range_.dmabuf_fds.size()));
  }
  for (size_t slice = 0; slice < count; ++slice) slices.emplace_back(nullptr, nic_->api().dereg_mr);
  const size_t parts = std::min(count, kAtATime);
  return each(parts, parts > 1, [&](size_t part) {
    for (size_t slice = part; slice < count; slice += parts) {
      slices[slice].reset(register_slice(slice, access));
      if (!slices[slice]) return refused(*nic_, range_, bytes_of(slice), errno);
    }
    return Status{};
  });
}

uint64_t Memory::bytes_of(size_t slice) const {
  return std::min(range_.bytes - slice * kSliceBytes, kSliceBytes);
}

/// Returns false, and registers nothing, if the memory, the NIC or its driver does not allow it.
bool Memory::register_directly() {
  const size_t count = range_.pcie_dmabuf_fds.size();
  if (count == 0 || count != range_.dmabuf_fds.size() || !nic_->reaches_directly()) return false;
  for (size_t slice = 0; slice < count; ++slice) {
    ibv_mr* const made = nic_->register_pcie_dmabuf(range_.pcie_dmabuf_fds[slice], range_.dmabuf_offset,
                                                    bytes_of(slice), iova() + slice * kSliceBytes,
                                                    IBV_ACCESS_REMOTE_READ | IBV_ACCESS_RELAXED_ORDERING);
    if (made) {
      slices_.emplace_back(made, nic_->api().dereg_mr);
      continue;
    }
    slices_.clear();
    return false;
  }
  return true;
}

ibv_mr* Memory::register_slice(size_t slice, int access) const {
  const uint64_t at = slice * kSliceBytes, bytes = bytes_of(slice), iova = this->iova() + at;
  if (range_.dmabuf_fds.empty()) return nic_->register_memory(range_.base + at, bytes, iova, access);
  return nic_->register_dmabuf(range_.dmabuf_fds[slice], range_.dmabuf_offset, bytes, iova, access);
}

std::vector<uint32_t> Memory::lkeys() const { return keys(sinks_.empty() ? slices_ : sinks_, &ibv_mr::lkey); }
std::vector<uint32_t> Memory::rkeys() const { return keys(slices_, &ibv_mr::rkey); }

}  // namespace kvlink::verbs
