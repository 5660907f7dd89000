// SPDX-License-Identifier: Apache-2.0
#include "transports/cma_consent.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <span>
#include <unordered_map>
#include <utility>

#include "base/blob.h"
#include "base/host_identity.h"
#include "base/read_file.h"
#include "base/sys.h"
#include "base/unique_fd.h"

namespace kvlink::cma {
namespace {

uint64_t mapped_bytes() {
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return (sizeof(ConsentMemory) + page - 1) / page * page;
}

}  // namespace

std::string Region::key() const {
  BlobWriter to;
  to.u32(kMagic).u64(address).u64(bytes).u32(static_cast<uint32_t>(access));
  return to.u64(memfd).u64(memfd_inode).u64(memfd_offset).take();
}

Result<Region> Region::parse(std::string_view key) {
  BlobReader from(key, kMagic);
  Region parsed;
  from.fields(parsed.address, parsed.bytes);
  parsed.access = from.u32();
  from.fields(parsed.memfd, parsed.memfd_inode, parsed.memfd_offset);
  if (!from.done() || parsed.access > kLastAccess || parsed.bytes > UINT64_MAX - parsed.address) {
    return Status::AccessDenied("not a key of a cma region");
  }
  return parsed;
}

Result<Identity> Identity::of(uint64_t pid, const WorkerRun& run) {
  if (run.worker.size() > kMaxWorkerBytes) return Status::Config("the name of a worker is too long for cma");
  Identity identity{.pid = pid, .epoch = run.epoch, .worker_bytes = run.worker.size()};
  std::copy(run.worker.begin(), run.worker.end(), identity.worker.begin());
  return identity;
}

Result<std::shared_ptr<Consent>> Consent::make(const WorkerRun& self) {
  const Result<Identity> identity = Identity::of(static_cast<uint64_t>(::getpid()), self);
  if (!identity.ok()) return identity.status();
  static const std::string kDoing = "cannot prepare for readers of cma";
  const UniqueFd memfd(sys::make_memfd(kMappingName, MFD_CLOEXEC));
  if (!memfd) return sys::transport_failed(kDoing, "memfd_create", errno);
  if (sys::set_size(memfd.get(), mapped_bytes()) != 0)
    return sys::transport_failed(kDoing, "ftruncate", errno);
  void* const mapped = sys::map_private(mapped_bytes(), memfd.get());
  if (mapped == MAP_FAILED) return sys::transport_failed(kDoing, "mmap", errno);
  // The pages are zeros, and those that no reader needs stay unused.
  auto* const memory = static_cast<ConsentMemory*>(mapped);
  memory->identity = *identity;
  memory->stamp = random_u64() | 1;
  return std::shared_ptr<Consent>(new Consent(memory));
}

Consent::~Consent() { ::munmap(memory_, mapped_bytes()); }

uint32_t Consent::admit(uint64_t caller, const Challenge& challenge) {
  std::lock_guard lock(mutex_);
  const uint32_t place = place_for(caller);
  if (place == held_.size()) held_.emplace_back();
  held_[place] = {caller, ++num_admitted_};
  memory_->challenges[place] = challenge;
  return place;
}

/// Returns a free place; or the oldest of this caller if it has its share, else of the caller that has most.
uint32_t Consent::place_for(uint64_t caller) const {
  std::unordered_map<uint64_t, uint32_t> places;
  for (const Held& held : held_) ++places[held.caller];
  uint64_t loser = caller;
  if (places[caller] < kMostOfOneCaller) {
    if (held_.size() < kNumChallenges) return static_cast<uint32_t>(held_.size());
    const auto has_fewer = [](const auto& one, const auto& other) { return one.second < other.second; };
    loser = std::max_element(places.begin(), places.end(), has_fewer)->first;
  }
  const auto goes_later = [&](const Held& one, const Held& other) {
    return std::pair(one.caller != loser, one.since) < std::pair(other.caller != loser, other.since);
  };
  return static_cast<uint32_t>(std::min_element(held_.begin(), held_.end(), goes_later) - held_.begin());
}

Status Consent::add(const Region& region) {
  std::lock_guard lock(mutex_);
  const uint64_t num_regions = memory_->num_regions.load(std::memory_order_relaxed);
  const std::span known(memory_->regions.data(), num_regions);
  if (const auto unused = std::find(known.begin(), known.end(), Region{}); unused != known.end()) {
    *unused = region;
    return {};
  }
  if (num_regions == kMaxRegions) return Status::Config("too many regions for cma");
  memory_->regions[num_regions] = region;
  memory_->num_regions.store(num_regions + 1, std::memory_order_release);
  return {};
}

void Consent::remove(const Region& region) {
  std::lock_guard lock(mutex_);
  const std::span known(memory_->regions.data(), memory_->num_regions);
  const auto found = std::find(known.begin(), known.end(), region);
  if (found != known.end()) *found = {};
}

void Consent::withdraw() {
  std::lock_guard lock(mutex_);
  memory_->stamp = 0;
  memory_->identity = {};
  memory_->num_regions = 0;
}

Result<bool> has_consent_at(int pid, uint64_t address) {
  // "7f5be0a00000-7f5be0a78000 rw-p 00000000 00:01 2049   /memfd:kvlink-cma-consent (deleted)"
  std::array<char, 64> range;
  std::snprintf(range.data(), range.size(), "%08lx-%08lx rw-p ", address, address + mapped_bytes());
  const std::string name = std::string(" /memfd:") + kMappingName + " (deleted)";
  const std::string path = "/proc/" + std::to_string(pid) + "/maps";
  const std::optional<std::string> maps = read_file(path);
  if (!maps) return Status::Unavailable("cannot read " + path, "mount /proc, or use shm or tcp");
  for (std::string_view rest = *maps; !rest.empty();) {
    const std::string_view line = take_line(rest);
    if (line.starts_with(range.data())) return line.ends_with(name);
  }
  return false;
}

}  // namespace kvlink::cma
