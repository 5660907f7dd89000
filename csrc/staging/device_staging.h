// SPDX-License-Identifier: Apache-2.0
// The staging buffer: memory of the reader's own GPU. Reads land there that would go into the pool in many
// tiny pieces, because the two ends lay their blocks out differently. They arrive in long ranges, and one
// kernel launch moves the pieces to their places.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "device/device_copier.h"
#include "staging/staged_transport.h"
#include "staging/staging_policy.h"
#include "transport_api/transport.h"

namespace kvlink {

struct StagingOptions {
  MemoryRange memory = {};  // on the pool's GPU, as NICs are to register it; none: there is no staging
  bool always = false;      // else where it should be faster
};

/// Returns the assumed costs of both ways into GPU memory over a transport. Pulls refine them.
const StagingCosts& prior_costs(std::string_view transport);

/// Returns kConfig if the memory is smaller than a slot.
Result<std::shared_ptr<StagingBuffer>> make_staging(const MemoryRange& memory,
                                                    const MakeDeviceCopier& make_copier);

/// One transport's use of the staging buffer. Any thread.
class DeviceStaging {
 public:
  /// `slot_region` is the number of the buffer in the order in which the transport's memory is registered.
  DeviceStaging(std::shared_ptr<StagingBuffer> staging, std::string_view transport, bool always,
                uint32_t slot_region);

  /// Gives an endpoint, which reaches the pool's device, the staged way into it.
  Result<std::unique_ptr<StageableEndpoint>> wrap(std::unique_ptr<Endpoint> inner) const;
  /// Makes the policy that decides which reads of one connection are staged.
  std::shared_ptr<StagingPolicy> make_policy() const;

 private:
  std::shared_ptr<StagingBuffer> staging_;
  StagingCosts costs_;
  uint32_t slot_region_;
};

}  // namespace kvlink
