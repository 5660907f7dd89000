// SPDX-License-Identifier: Apache-2.0
// A small model of NICs: a key names a registration, and what leaves it is refused.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "transports/verbs/registration.h"
#include "transports/verbs/work_requests.h"

namespace kvlink::verbs {

inline std::byte* at_address(uint64_t address) { return reinterpret_cast<std::byte*>(address); }
inline uint64_t address_of(const std::byte* at) { return reinterpret_cast<uintptr_t>(at); }

/// Registrations by key: [iova, iova + bytes) is the memory at `host`.
class ModelNic {
 public:
  uint32_t register_everywhere(uint64_t iova, uint64_t bytes, uint64_t host) {
    registered_[++last_key_] = {iova, bytes, host};
    return last_key_;
  }

  /// Where it lies in memory. Fails the test if it leaves its registration.
  uint64_t resolve(uint32_t key, uint64_t address, uint64_t bytes) const {
    const auto found = registered_.find(key);
    if (found == registered_.end()) {
      ADD_FAILURE() << "no such key: " << key;
      return 0;
    }
    const auto& [iova, size, host] = found->second;
    EXPECT_TRUE(address >= iova && bytes <= size && address - iova <= size - bytes)
        << "leaves its registration";
    return host + (address - iova);
  }

 private:
  struct Registered {
    uint64_t iova, bytes, host;
  };
  std::map<uint32_t, Registered> registered_;
  uint32_t last_key_ = 100;
};

/// Two ends: what a plan can name, and a NIC of each that knows it.
struct Fabric {
  ModelNic reader, owner;
  std::vector<LocalRegion> locals;
  std::vector<uint64_t> local_bytes;
  std::vector<RemoteRegion> remotes;
  std::vector<uint64_t> remote_hosts;

  void add_local(uint64_t host, uint64_t bytes, uint64_t iova) {
    LocalRegion& region = locals.emplace_back(LocalRegion{at_address(host), bytes, iova, {}});
    for (uint64_t at = 0; at < bytes; at += kSliceBytes) {
      region.lkeys.push_back(
          reader.register_everywhere(iova + at, std::min(kSliceBytes, bytes - at), host + at));
    }
    local_bytes.push_back(bytes);
  }

  void add_remote(uint64_t host, uint64_t bytes, uint64_t iova, uint64_t slice_bytes) {
    RemoteRegion& region = remotes.emplace_back(RemoteRegion{Access::kRead, iova, bytes, slice_bytes, {}});
    for (uint64_t at = 0; at < bytes; at += slice_bytes) {
      region.rkeys.push_back(
          owner.register_everywhere(iova + at, std::min(slice_bytes, bytes - at), host + at));
    }
    remote_hosts.push_back(host);
  }
};

}  // namespace kvlink::verbs
