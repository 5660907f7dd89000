// SPDX-License-Identifier: Apache-2.0
#include "transports/verbs/ports.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/sys.h"

namespace kvlink::verbs {
namespace {

template <typename T>
bool is_running(const std::future<T>& job) {
  return job.valid() && job.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
}

/// Invalid where no thread is to be had; `job` is forgotten then.
template <typename Job>
auto aside(Job job) -> std::future<decltype(job())> {
  try {
    return std::async(std::launch::async, std::move(job));
  } catch (const std::system_error&) {
    return {};
  }
}

/// Of a port that goes. Queue pairs end before the completion queue that is theirs.
struct Leaving {
  std::shared_ptr<const Berth> berth;
  std::vector<std::unique_ptr<Qp>> served;
};

size_t num_slices(const MemoryRange& range) { return (range.bytes + kSliceBytes - 1) / kSliceBytes; }

}  // namespace

Result<std::unique_ptr<Ports>> Ports::make(std::vector<std::shared_ptr<Nic>> nics, Open open) {
  std::unique_ptr<Ports> ports(new Ports(std::move(open)));
  for (auto& nic : nics) {
    const NicPlace place = nic->place();
    const NicAddress address = nic->address();
    auto berth = equip(std::move(nic));
    if (!berth.ok()) return berth.status();
    ports->ports_.push_back({place, *berth, address});
  }
  return ports;
}

Result<std::shared_ptr<Berth>> Ports::equip(std::shared_ptr<Nic> nic) {
  auto berth = std::make_shared<Berth>();
  berth->nic = std::move(nic);
  auto cm = berth->nic->by_cm() ? open_cm_port(berth->nic) : std::shared_ptr<CmPort>();
  if (!cm.ok()) return cm.status();
  berth->cm = *cm;
  auto cq = Cq::create(berth->nic, kServedCqes, false);
  if (!cq.ok()) return cq.status();
  berth->cq = std::move(*cq);
  return berth;
}

std::shared_ptr<const Berth> Ports::at(size_t port) const {
  std::lock_guard lock(mutex_);
  return ports_[port].berth;
}

Status Ports::why_away(size_t port) const {
  std::lock_guard lock(mutex_);
  return Status::Unavailable("RDMA port " + ports_[port].address.name + " " + ports_[port].away,
                             "it is used again by itself once it is back; see dmesg");
}

Address Ports::address() const {
  std::lock_guard lock(mutex_);
  Address address;
  for (const Port& port : ports_)
    address.nics.push_back(port.berth ? port.berth->nic->address() : port.address);
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

Result<size_t> Ports::enlist(const MemoryRange& range, Rights rights) {
  Range kept{range, rights, nullptr};
  if (range.dmabuf_fd >= 0) {  // the caller's is open until the start only
    kept.dmabuf = std::make_shared<UniqueFd>(sys::duplicate(range.dmabuf_fd));
    kept.at.dmabuf_fd = kept.dmabuf->get();
    if (!*kept.dmabuf) return sys::transport_failed("cannot keep the pool's dma-buf", "fcntl", errno);
  }
  std::vector<std::shared_ptr<Nic>> nics;
  for (size_t port = 0; port < size(); ++port) {
    const auto berth = at(port);
    if (!berth) return why_away(port);
    nics.push_back(berth->nic);
  }
  auto memory = Memory::enlist(nics, kept.at, rights);
  if (!memory.ok()) return memory.status();
  std::lock_guard lock(mutex_);
  ranges_.push_back(std::move(kept));
  for (size_t port = 0; port < ports_.size(); ++port) {
    if (ports_[port].berth) ports_[port].berth->memory.push_back((*memory)[port]);
  }
  return ranges_.size() - 1;
}

std::vector<LocalRegion> Ports::locals(size_t port) const {
  std::lock_guard lock(mutex_);
  std::vector<LocalRegion> regions;
  const auto& berth = ports_[port].berth;
  if (!berth) return regions;
  for (const auto& memory : berth->memory)
    regions.push_back({memory->range().base, memory->range().bytes, memory->iova(), memory->lkeys()});
  return regions;
}

/// A port that is away has keys that name nothing; nobody is admitted there.
RemoteKey Ports::key(size_t region, Access access) const {
  std::lock_guard lock(mutex_);
  if (region >= ranges_.size()) return {};  // closed
  const MemoryRange& range = ranges_[region].at;
  RemoteKey key{access, iova_of(range), range.bytes, kSliceBytes, {}};
  for (const Port& port : ports_) {
    const bool here = port.berth && region < port.berth->memory.size();
    key.rkeys.push_back(here ? port.berth->memory[region]->rkeys()
                             : std::vector<uint32_t>(num_slices(range)));
  }
  return key;
}

Ports::Change Ports::look(size_t index, int64_t now) {
  std::lock_guard lock(mutex_);
  Port& port = ports_[index];
  if (closed_) return Change::kNone;
  if (port.berth) {
    port.berth->nic->look();
    return port.berth->nic->gone() ? Change::kLost : Change::kNone;
  }
  if (is_running(port.leaving) || is_running(port.attempt)) return Change::kNone;
  if (port.attempt.valid()) return settle(port, now);
  if (!port.search.due(now)) return Change::kNone;
  port.attempt =
      aside([open = open_, place = port.place, ranges = ranges_] { return reopen(open, place, ranges); });
  if (!port.attempt.valid()) port.search.missed(now);
  return Change::kNone;
}

/// Closing and opening a device takes as long as its driver and the amount of memory make it take.
void Ports::let_go(size_t index, int64_t now, std::vector<std::unique_ptr<Qp>> served) {
  std::lock_guard lock(mutex_);
  Port& port = ports_[index];
  port.address = port.berth->nic->address();
  port.away = port.berth->nic->how_lost();
  ++port.times_away;
  std::erase_if(port.left, [](const auto& nic) { return nic.expired(); });
  port.left.push_back(port.berth->nic);
  port.search.lost(now);
  port.leaving = aside([leaving = Leaving{std::move(port.berth), std::move(served)}]() mutable {
    const Leaving ends_here = std::move(leaving);
  });
}

Result<std::shared_ptr<Berth>> Ports::reopen(const Open& open, const NicPlace& place,
                                             const std::vector<Range>& ranges) {
  auto nic = open(place);
  if (!nic.ok()) return nic.status();
  auto berth = equip(*nic);
  if (!berth.ok()) return berth.status();
  for (const Range& range : ranges) {
    auto memory = Memory::enlist(std::span(&*nic, 1), range.at, range.rights);
    if (!memory.ok()) return memory.status();
    (*berth)->memory.push_back((*memory).front());
  }
  return berth;
}

Ports::Change Ports::settle(Port& port, int64_t now) {
  auto found = port.attempt.get();
  if (!found.ok()) {
    port.search.missed(now);
    return Change::kNone;
  }
  port.berth = std::move(*found);
  port.search.found(now);
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
      closing.push_back({port.place, std::move(port.berth), port.address, port.away, port.times_away});
      closing.back().leaving = std::move(port.leaving);
      closing.back().attempt = std::move(port.attempt);
      port.away = "is closed";
    }
  }
  closing.clear();  // before what was registered there
}

}  // namespace kvlink::verbs
