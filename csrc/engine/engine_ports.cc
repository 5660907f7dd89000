// SPDX-License-Identifier: Apache-2.0
// What the engine does about devices that come and go.
#include <algorithm>
#include <functional>
#include <iterator>

#include "engine/engine.h"

namespace kvlink {

/// After the reader's lanes were admitted: whatever device they are at, these are its keys or nobody's.
Status Engine::tell_keys(const Row& row, bool takes_keys, Accepted& accepted) {
  std::vector<std::string> keys;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return Status::Unavailable("this worker is closed", {});
    for (const auto& region : row.regions) keys.push_back(region->remote_key());
  }
  if (keys.size() != pool_.size() + 2) return {};  // it lends nothing
  std::vector<std::string> lease_keys(std::make_move_iterator(keys.end() - 2),
                                      std::make_move_iterator(keys.end()));
  keys.resize(pool_.size());
  if (keys == row.access.pool_keys && lease_keys == row.access.lease_keys) return {};
  if (!takes_keys) {
    return Status::Unavailable("a device of this worker's " + row.name +
                                   " was removed and came back with other keys, of which a "
                                   "reader of an older release cannot be told",
                               "upgrade the reader, or restart this worker");
  }
  accepted.pool_keys = std::move(keys);
  accepted.lease_keys = std::move(lease_keys);
  return {};
}

/// While a device is gone, until nobody holds it any more: it cannot leave before.
void Engine::look_after_ports(Row& row) {
  std::vector<PortState> ports = row.transport->ports();
  if (ports.empty()) return;
  std::vector<std::weak_ptr<Connection>> connections;
  {
    std::lock_guard lock(mutex_);
    if (std::any_of(ports.begin(), ports.end(), std::mem_fn(&PortState::held))) connections = connections_;
    if (ports != row.ports) {
      row.ports = std::move(ports);
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
  for (const Row& row : rows_) all.insert(all.end(), row.ports.begin(), row.ports.end());
  return all;
}

void Engine::watch_ports(const std::shared_ptr<CompletionQueue>& queue) {
  std::lock_guard lock(mutex_);
  port_watchers_.push_back(queue);
}

}  // namespace kvlink
