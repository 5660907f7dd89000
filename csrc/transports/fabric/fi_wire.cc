// SPDX-License-Identifier: Apache-2.0
#include "transports/fabric/fi_wire.h"

#include <mutex>
#include <utility>

#include "base/clock.h"

namespace kvlink::fabric {
namespace {

constexpr size_t kPollBatch = 16;
constexpr int64_t kDrainNs = 200'000'000;

/// An endpoint that cannot be closed, with all that it uses.
struct Stuck {
  std::shared_ptr<const Domain> domain;
  std::vector<fi_context2> contexts;
  std::vector<uint64_t> words;
  Port port;
};

/// Until the process ends. A provider that is driven by its user moves no byte of an endpoint that nobody
/// polls.
void keep_open(Stuck stuck) {
  static std::mutex mutex;
  static auto* const all = new std::vector<Stuck>;
  const std::lock_guard lock(mutex);
  all->push_back(std::move(stuck));
}

}  // namespace

FiWire::FiWire(std::shared_ptr<const Domain> domain, const OpLimits& limits)
    : domain_(std::move(domain)), contexts_(limits.ops), words_(limits.ops + 1), locals_(domain_->locals()) {}

Result<std::unique_ptr<FiWire>> FiWire::open(std::shared_ptr<const Domain> domain, const std::string& peer) {
  const OpLimits limits = domain->limits();
  std::unique_ptr<FiWire> wire(new FiWire(std::move(domain), limits));
  auto words = wire->domain_->register_own(wire->words_.data(), wire->words_.size() * sizeof(uint64_t));
  if (!words.ok()) return words.status();
  wire->words_region_ = std::move(*words);
  auto port = wire->domain_->open_port(limits.ops);
  if (!port.ok()) return port.status();
  wire->port_ = std::move(*port);
  if (::fi_av_insert(wire->port_.av.get(), peer.data(), 1, &wire->peer_, 0, nullptr) != 1) {
    return Status::Unavailable("the owner's address is none of " + wire->domain_->provider(), {});
  }
  return wire;
}

Wire::Taken FiWire::taken(ssize_t error) {
  under_way_ += error == 0;
  if (error == 0) return Taken::kYes;
  if (error == -FI_EAGAIN) return Taken::kLater;
  why_ =
      Status::Unreachable(failed(domain_->api(), domain_->provider() + " does not reach the owner", error));
  return Taken::kFailed;
}

void* FiWire::desc_of(uint32_t region) const {
  if (region < locals_.size()) return locals_[region].desc;
  return region == kOwnWord && words_region_ ? ::fi_mr_desc(words_region_.get()) : nullptr;
}

Wire::Taken FiWire::read(uint32_t op, const RemoteRegion& from, uint64_t offset,
                         std::span<const Segment> pieces) {
  std::array<iovec, kMostPieces> into;
  std::array<void*, kMostPieces> descs;
  fi_rma_iov source{from.base + offset, 0, from.key};
  for (size_t i = 0; i < pieces.size(); ++i) {
    into[i] = {pieces[i].local, pieces[i].bytes};
    descs[i] = desc_of(pieces[i].region);
    source.len += pieces[i].bytes;
  }
  const fi_msg_rma message{into.data(), descs.data(), pieces.size(), peer_, &source, 1, &contexts_[op], 0};
  return taken(::fi_readmsg(port_.ep.get(), &message, FI_COMPLETION));
}

/// Never injected: the completion has to say that the owner's memory has the word.
Wire::Taken FiWire::write(uint32_t op, const RemoteRegion& to, uint64_t offset, uint64_t value) {
  words_[op] = value;
  const iovec from{&words_[op], sizeof value};
  void* desc = desc_of(kOwnWord);
  const fi_rma_iov target{to.base + offset, sizeof value, to.key};
  const fi_msg_rma message{&from, &desc, 1, peer_, &target, 1, &contexts_[op], 0};
  return taken(::fi_writemsg(port_.ep.get(), &message, FI_COMPLETION | FI_DELIVERY_COMPLETE));
}

Status FiWire::failure() const {
  fi_cq_err_entry entry{};
  if (::fi_cq_readerr(port_.cq.get(), &entry, 0) < 0)
    return Status::Unreachable(domain_->provider() + ": the completion queue failed");
  const char* detail = ::fi_cq_strerror(port_.cq.get(), entry.prov_errno, entry.err_data, nullptr, 0);
  std::string what = failed(domain_->api(), domain_->provider() + ": the owner was not read", entry.err);
  if (detail && *detail) what.append(" (").append(detail).append(")");
  const bool denied = entry.err == FI_EACCES || entry.err == FI_EKEYREJECTED || entry.err == FI_EPERM;
  return denied ? Status::AccessDenied(what) : Status::Unreachable(what);
}

Status FiWire::poll(std::vector<uint32_t>& ended) {
  std::array<fi_cq_entry, kPollBatch> entries;
  for (ssize_t count = kPollBatch; count == kPollBatch;) {
    count = ::fi_cq_read(port_.cq.get(), entries.data(), entries.size());
    if (count == -FI_EAGAIN) return {};
    if (count < 0) {
      under_way_ -= under_way_ > 0;
      return why_ = failure();
    }
    for (const fi_cq_entry& entry : std::span(entries).first(static_cast<size_t>(count))) {
      ended.push_back(static_cast<uint32_t>(static_cast<fi_context2*>(entry.op_context) - contexts_.data()));
    }
    under_way_ -= static_cast<uint32_t>(count);
  }
  return {};
}

bool FiWire::may_sleep() const {
  if (port_.wait_fd < 0) return true;
  fid* const queue = &port_.cq.get()->fid;
  fid* queues[] = {queue};
  return ::fi_trywait(domain_->fabric(), queues, 1) == FI_SUCCESS;
}

/// Bytes land meanwhile, as before.
void FiWire::drain() {
  std::vector<uint32_t> ended;
  for (const int64_t end = now_ns() + kDrainNs; under_way_ > 0 && now_ns() < end;) {
    ended.clear();
    static_cast<void>(poll(ended));
  }
}

void FiWire::close() {
  if (!port_.ep) return;
  if (domain_->crashes_amid_reads() && under_way_ > 0) drain();
  if (domain_->crashes_amid_reads() && under_way_ > 0) {
    keep_open({domain_, std::move(contexts_), std::move(words_), std::move(port_)});
    return;
  }
  port_.close();
}

}  // namespace kvlink::fabric
