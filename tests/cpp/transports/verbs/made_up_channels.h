// SPDX-License-Identifier: Apache-2.0
// Completion channels of made-up devices.
#pragma once

#include <sys/eventfd.h>

#include "base/unique_fd.h"
#include "transports/verbs/ibverbs_api.h"

namespace kvlink::verbs::testing {

/// Gives `api` channels with descriptors on which nothing arrives by itself.
inline void make_up_channels(Api& api) {
  api.create_comp_channel = [](ibv_context*) -> ibv_comp_channel* {
    auto* const channel = new ibv_comp_channel{};
    channel->fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return channel;
  };
  api.destroy_comp_channel = [](ibv_comp_channel* channel) {
    UniqueFd(channel->fd).reset();
    delete channel;
    return 0;
  };
}

}  // namespace kvlink::verbs::testing
