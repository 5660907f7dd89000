// SPDX-License-Identifier: Apache-2.0
// The engine's part when devices come and go.
#include <algorithm>
#include <functional>
#include <iterator>

#include "engine/engine.h"

namespace kvlink {

/// To be called after the reader's lanes were admitted, so that the keys belong to the devices that the lanes
/// use.
Status Engine::add_changed_keys(const TransportState& state, bool takes_keys, Accepted& accepted) {
  std::vector<std::string> keys;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return Status::Unavailable("this worker is closed", {});
    for (const auto& region : state.regions) keys.push_back(region->remote_key());
  }
  if (keys.size() != pool_.size() + 2) return {};  // it exports nothing
  std::vector<std::string> lease_keys(std::make_move_iterator(keys.end() - 2),
                                      std::make_move_iterator(keys.end()));
  keys.resize(pool_.size());
  if (keys == state.access.pool_keys && lease_keys == state.access.lease_keys) return {};
  if (!takes_keys) {
    return Status::Unavailable("a device of this worker's " + state.name +
                                   " was removed and came back with other keys, which a "
                                   "reader of an older release cannot take",
                               "upgrade the reader, or restart this worker");
  }
  accepted.pool_keys = std::move(keys);
  accepted.lease_keys = std::move(lease_keys);
  return {};
}

/// Runs while a device is gone, until nothing holds it any more; the device cannot leave before.
void Engine::check_ports(TransportState& state) {
  std::vector<PortState> ports = state.transport->ports();
  std::erase_if(ports, std::mem_fn(&PortState::left_out));
  if (ports.empty()) return;
  std::vector<std::weak_ptr<Connection>> connections;
  {
    std::lock_guard lock(mutex_);
    if (std::any_of(ports.begin(), ports.end(), std::mem_fn(&PortState::held))) connections = connections_;
    if (ports != state.ports) {
      state.ports = std::move(ports);
      tell(port_watchers_, 0);
    }
  }
  for (const auto& known : connections) {
    if (const auto connection = known.lock()) connection->look_after();
  }
}

std::vector<PortState> Engine::ports() const {
  std::lock_guard lock(mutex_);
  std::vector<PortState> all;
  for (const TransportState& state : transports_)
    all.insert(all.end(), state.ports.begin(), state.ports.end());
  return all;
}

void Engine::watch_ports(const std::shared_ptr<CompletionQueue>& queue) {
  std::lock_guard lock(mutex_);
  port_watchers_.push_back(queue);
}

}  // namespace kvlink
