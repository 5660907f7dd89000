// SPDX-License-Identifier: Apache-2.0
#include "transports/verbs/ports.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/sys.h"
#include "transports/verbs/aside.h"

namespace kvlink::verbs {
namespace {

/// The rest of a port that goes. Queue pairs end before their completion queue.
struct Leaving {
  std::shared_ptr<const OpenPort> opened;
  std::vector<std::unique_ptr<Qp>> served;
};

size_t num_slices(const MemoryRange& range) { return (range.bytes + kSliceBytes - 1) / kSliceBytes; }

}  // namespace

Result<std::unique_ptr<Ports>> Ports::make(std::vector<std::shared_ptr<Nic>> nics, Open open) {
  std::unique_ptr<Ports> ports(new Ports(std::move(open)));
  for (auto& nic : nics) {
    const NicPlace place = nic->place();
    const NicAddress address = nic->address();
    auto opened = equip(std::move(nic));
    if (!opened.ok()) return opened.status();
    ports->ports_.push_back({place, *opened, address});
  }
  return ports;
}

Result<std::shared_ptr<OpenPort>> Ports::equip(std::shared_ptr<Nic> nic) {
  auto opened = std::make_shared<OpenPort>();
  opened->nic = std::move(nic);
  auto cm = opened->nic->by_cm() ? open_cm_port(opened->nic) : std::shared_ptr<CmPort>();
  if (!cm.ok()) return cm.status();
  opened->cm = *cm;
  auto cq = Cq::create(opened->nic, kServedCqes, false);
  if (!cq.ok()) return cq.status();
  opened->cq = std::move(*cq);
  return opened;
}

std::shared_ptr<const OpenPort> Ports::at(size_t port) const {
  std::lock_guard lock(mutex_);
  return ports_[port].opened;
}

Status Ports::why_away(size_t port) const {
  std::lock_guard lock(mutex_);
  return Status::Unavailable("RDMA port " + ports_[port].address.name + " " + ports_[port].away,
                             "it rejoins automatically once it is back; see dmesg");
}

Address Ports::address() const {
  std::lock_guard lock(mutex_);
  Address address;
  for (const Port& port : ports_)
    address.nics.push_back(port.opened ? port.opened->nic->address() : port.address);
  return address;
}

std::vector<PortState> Ports::states() const {
  std::lock_guard lock(mutex_);
  std::vector<PortState> states;
  for (const Port& port : ports_) {
    const bool held =
        std::any_of(port.left.begin(), port.left.end(), [](const auto& nic) { return !nic.expired(); });
    states.push_back({port.address.name, port.away, port.times_away, held});
  }
  return states;
}

bool Ports::busy(size_t port) const {
  std::lock_guard lock(mutex_);
  return is_running(ports_[port].leaving) || is_running(ports_[port].attempt);
}

Result<size_t> Ports::register_everywhere(const MemoryRange& range, Rights rights) {
  Range kept{range, rights, nullptr};
  std::vector<UniqueFd> dmabufs;  // the caller's are open until the start only
  for (std::vector<int>* const fds : {&kept.at.dmabuf_fds, &kept.at.pcie_dmabuf_fds}) {
    for (int& fd : *fds) {
      dmabufs.emplace_back(sys::duplicate(fd));
      if (!dmabufs.back()) return sys::transport_failed("cannot keep the pool's dma-buf", "fcntl", errno);
      fd = dmabufs.back().get();
    }
  }
  kept.dmabufs = std::make_shared<std::vector<UniqueFd>>(std::move(dmabufs));
  const auto memory = register_at_ports(kept.at, rights);
  std::lock_guard lock(mutex_);
  ranges_.push_back(memory.ok() ? std::move(kept) : Range{{}, rights, nullptr});
  for (size_t port = 0; port < ports_.size(); ++port) {
    if (!ports_[port].opened) continue;
    ports_[port].opened->memory.resize(ranges_.size());
    if (memory.ok()) ports_[port].opened->memory.back() = (*memory)[port];
  }
  final_ |= rights == Rights::kPeersWriteWords;
  return memory.ok() ? Result<size_t>(ranges_.size() - 1) : memory.status();
}

Result<std::vector<std::shared_ptr<const Memory>>> Ports::register_at_ports(const MemoryRange& range,
                                                                            Rights rights) {
  std::vector<std::shared_ptr<Nic>> nics;
  for (size_t port = 0; port < size(); ++port) {
    const auto opened = at(port);
    if (!opened) return why_away(port);
    nics.push_back(opened->nic);
  }
  auto memory = Memory::register_everywhere(nics, range, rights);
  return memory.ok() || final_ ? memory : register_one_by_one(range, rights, memory.status());
}

void Ports::drop(size_t region) {
  std::vector<std::shared_ptr<const Memory>> dropped;  // released without the lock
  std::lock_guard lock(mutex_);
  if (region >= ranges_.size()) return;
  ranges_[region].at = {};
  for (Port& port : ports_) {
    if (port.opened && region < port.opened->memory.size())
      dropped.push_back(std::exchange(port.opened->memory[region], nullptr));
  }
}

/// REQUIRES that every port is open.
Result<std::vector<std::shared_ptr<const Memory>>> Ports::register_one_by_one(const MemoryRange& range,
                                                                              Rights rights,
                                                                              Status why_not_all) {
  std::vector<std::shared_ptr<const Memory>> all;
  std::vector<PortState> left_out;
  std::vector<Port> fit;
  std::lock_guard lock(mutex_);
  for (Port& port : ports_) {
    auto made = Memory::register_everywhere(std::span(&port.opened->nic, 1), range, rights);
    if (!made.ok() && port.place.named) return made.status();
    if (made.ok()) {
      all.push_back((*made).front());
      fit.push_back({port.place, port.opened, port.address});
    } else {
      left_out.push_back({.name = port.address.name, .away = made.status().sentence(), .left_out = true});
    }
  }
  if (all.empty()) return why_not_all;
  ports_ = std::move(fit);
  left_out_.insert(left_out_.end(), left_out.begin(), left_out.end());
  return all;
}

std::vector<PortState> Ports::left_out() const {
  std::lock_guard lock(mutex_);
  return left_out_;
}

std::vector<LocalRegion> Ports::locals(size_t port) const {
  std::lock_guard lock(mutex_);
  std::vector<LocalRegion> regions;
  const auto& opened = ports_[port].opened;
  if (!opened) return regions;
  for (const auto& memory : opened->memory) {
    regions.push_back(
        memory ? LocalRegion{memory->range().base, memory->range().bytes, memory->iova(), memory->lkeys()}
               : LocalRegion{});
  }
  return regions;
}

/// The keys of an absent port name nothing, and no reader is admitted there.
RemoteKey Ports::key(size_t region, Access access) const {
  std::lock_guard lock(mutex_);
  if (region >= ranges_.size()) return {};  // closed
  const MemoryRange& range = ranges_[region].at;
  RemoteKey key{access, iova_of(range), range.bytes, kSliceBytes, {}};
  for (const Port& port : ports_) {
    const bool here = port.opened && region < port.opened->memory.size() && port.opened->memory[region];
    key.rkeys.push_back(here ? port.opened->memory[region]->rkeys()
                             : std::vector<uint32_t>(num_slices(range)));
  }
  return key;
}

Ports::Change Ports::poll(size_t index, int64_t now) {
  std::lock_guard lock(mutex_);
  Port& port = ports_[index];
  if (closed_) return Change::kNone;
  if (port.opened) {
    port.opened->nic->poll();
    return port.opened->nic->removed() ? Change::kLost : Change::kNone;
  }
  if (is_running(port.leaving) || is_running(port.attempt)) return Change::kNone;
  if (port.attempt.valid()) return settle(port, now);
  if (!port.backoff.due(now)) return Change::kNone;
  port.attempt =
      aside([open = open_, place = port.place, ranges = ranges_] { return reopen(open, place, ranges); });
  if (!port.attempt.valid()) port.backoff.missed(now);
  return Change::kNone;
}

/// Closing and opening a device takes time that depends on its driver and the amount of memory.
void Ports::release(size_t index, int64_t now, std::vector<std::unique_ptr<Qp>> served) {
  std::lock_guard lock(mutex_);
  Port& port = ports_[index];
  port.address = port.opened->nic->address();
  port.away = port.opened->nic->how_lost();
  ++port.times_away;
  std::erase_if(port.left, [](const auto& nic) { return nic.expired(); });
  port.left.push_back(port.opened->nic);
  port.backoff.lost(now);
  port.leaving = aside([leaving = Leaving{std::move(port.opened), std::move(served)}]() mutable {
    const Leaving ends_here = std::move(leaving);
  });
}

Result<std::shared_ptr<OpenPort>> Ports::reopen(const Open& open, const NicPlace& place,
                                                const std::vector<Range>& ranges) {
  auto nic = open(place);
  if (!nic.ok()) return nic.status();
  auto opened = equip(*nic);
  if (!opened.ok()) return opened.status();
  for (const Range& range : ranges) {
    if (!range.at.base) {
      (*opened)->memory.push_back(nullptr);
      continue;
    }
    auto memory = Memory::register_everywhere(std::span(&*nic, 1), range.at, range.rights);
    if (!memory.ok()) return memory.status();
    (*opened)->memory.push_back((*memory).front());
  }
  return opened;
}

Ports::Change Ports::settle(Port& port, int64_t now) {
  auto found = port.attempt.get();
  if (!found.ok()) {
    port.backoff.missed(now);
    return Change::kNone;
  }
  port.opened = std::move(*found);
  for (size_t region = 0; region < port.opened->memory.size(); ++region) {
    if (!ranges_[region].at.base) port.opened->memory[region].reset();  // dropped meanwhile
  }
  port.backoff.found(now);
  port.away.clear();
  return Change::kBack;
}

void Ports::close() {
  std::vector<Port> closing;
  std::vector<Range> forgotten;
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    forgotten = std::move(ranges_);
    ranges_.clear();
    for (Port& port : ports_) {
      closing.push_back({port.place, std::move(port.opened), port.address, port.away, port.times_away});
      closing.back().leaving = std::move(port.leaving);
      closing.back().attempt = std::move(port.attempt);
      port.away = "is closed";
    }
  }
  closing.clear();  // before what was registered there
}

}  // namespace kvlink::verbs
