// SPDX-License-Identifier: Apache-2.0
// The staging buffer: memory of the reader's own GPU, where reads land that would go into the pool in many
// tiny pieces, because the two ends lay their blocks out differently. They come in long ranges, and one
// launch of a kernel takes the pieces to their places.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "device/device_copier.h"
#include "staging/staged_transport.h"
#include "transport_api/transport.h"

namespace kvlink {

struct StagingOptions {
  MemoryRange memory = {};  // on the pool's GPU, as NICs are to register it; none: there is no staging
  bool always = false;      // else where it should be faster
};

/// kConfig for less than a slot.
Result<std::shared_ptr<Landing>> make_staging(const MemoryRange& memory, const MakeDeviceCopier& make_copier);

/// Gives `inner`, which reaches the pool's device, the other way into it. As land_through().
std::unique_ptr<Transport> stage_wrap(std::unique_ptr<Transport> inner, std::shared_ptr<Landing> staging,
                                      std::string_view transport, bool always);

}  // namespace kvlink
