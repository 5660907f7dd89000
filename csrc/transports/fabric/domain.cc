// SPDX-License-Identifier: Apache-2.0
#include "transports/fabric/domain.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "base/host_identity.h"

namespace kvlink::fabric {
namespace {

// The limits of one endpoint: enough under way for a fabric, and few enough to be polled at once.
constexpr size_t kMostOps = 64;
constexpr uint64_t kMostBytes = 1 << 20;

/// Returns why a provider may not be used, or nothing.
std::string refused(std::string_view provider) {
  if (provider.find("shm") == std::string_view::npos) return {};
  return "does not compare keys: any process of the host could read this worker's memory (use shm or cma of "
         "kvlink)";
}

// Mended in 1.18: prov/tcp completes the read whose answer arrives twice when its connection ends.
bool crashes_amid_reads(const Api& api, std::string_view provider) {
  return provider == "tcp;ofi_rxm" && !FI_VERSION_GE(api.version(), FI_VERSION(1, 18));
}

/// `net` was a trial of what tcp is since 1.18.
bool only_by_name(const Api& api, std::string_view provider) {
  return crashes_amid_reads(api, provider) || provider.starts_with("net") || provider.starts_with("udp");
}

OwnedInfo make_hints(const Api& api, const std::string& provider) {
  OwnedInfo hints(api.dupinfo(nullptr), api.freeinfo);
  if (!hints) return hints;
  hints->caps = FI_RMA | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->threading = FI_THREAD_SAFE;
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
  if (!provider.empty()) hints->fabric_attr->prov_name = ::strdup(provider.c_str());
  return hints;
}

/// `host` is the address to bind, if not empty.
OwnedInfo ask(const Api& api, const std::string& provider, const std::string& host, int& error) {
  OwnedInfo found(nullptr, api.freeinfo);
  const OwnedInfo hints = make_hints(api, provider);
  fi_info* list = nullptr;
  error = hints ? api.getinfo(kVersion, host.empty() ? nullptr : host.c_str(), nullptr,
                              host.empty() ? 0 : FI_SOURCE, hints.get(), &list)
                : -FI_ENOMEM;
  if (error == 0) found.reset(list);
  return found;
}

/// Providers over IP bind an address of the host, others a device of their own.
bool is_ip(const fi_info& info) {
  return info.addr_format == FI_SOCKADDR || info.addr_format == FI_SOCKADDR_IN ||
         info.addr_format == FI_SOCKADDR_IN6;
}

uint64_t access_of(Access access) {
  if (access == Access::kWriteWords) return FI_REMOTE_WRITE;
  return access == Access::kLocal ? 0 : FI_REMOTE_READ;
}

}  // namespace

Domain::Domain(const Api& api, OwnedInfo info)
    : api_(api),
      info_(std::move(info)),
      provider_(info_->fabric_attr->prov_name),
      crashes_amid_reads_(fabric::crashes_amid_reads(api, provider_)) {}

Status Domain::open_objects() {
  int error = api_.fabric(info_->fabric_attr, fabric_.out(), nullptr);
  if (error == 0) error = ::fi_domain(fabric_.get(), info_.get(), domain_.out(), nullptr);
  return error == 0 ? Status{} : Status::Unavailable(failed(api_, "cannot be opened", error), {});
}

Result<std::shared_ptr<Domain>> Domain::open_one(const Api& api, const fi_info& found,
                                                 const TransportOptions& options) {
  const std::string name = found.fabric_attr->prov_name;
  if (const std::string why = refused(name); !why.empty()) return Status::Unavailable(why, {});
  int error = -FI_ENOMEM;
  const std::string& host = options.advertise.empty() ? options.host : options.advertise;
  OwnedInfo info = is_ip(found) ? ask(api, name, host, error) : OwnedInfo(api.dupinfo(&found), api.freeinfo);
  if (!info) return Status::Unavailable(failed(api, "does not bind " + host, error), {});
  std::shared_ptr<Domain> domain(new Domain(api, std::move(info)));
  if (Status status = domain->open_objects(); !status.ok()) return status;
  return domain;
}

std::string Domain::facts() const {
  const auto mode = static_cast<uint64_t>(info_->domain_attr->mr_mode);
  std::string facts = manual() ? "the owner's thread drives it" : "drives itself";
  if ((mode & FI_MR_PROV_KEY) != 0) facts += ", chooses keys";
  if ((mode & FI_MR_LOCAL) != 0) facts += ", reads into registered memory";
  return facts + ", " + std::to_string(info_->domain_attr->mr_key_size * 8) + "-bit keys, " +
         std::to_string(info_->tx_attr->iov_limit) + " pieces a read";
}

Result<std::vector<ProviderState>> Domain::list(const TransportOptions& options) {
  const auto loaded = fabric::api();
  if (!loaded.ok()) return loaded.status();
  const Api& api = **loaded;
  int error = 0;
  const OwnedInfo all = ask(api, {}, {}, error);
  std::vector<ProviderState> states;
  for (const fi_info* each = all.get(); each; each = each->next) {
    const std::string name = each->fabric_attr->prov_name;
    const auto is_it = [&name](const ProviderState& state) { return state.name == name; };
    if (std::any_of(states.begin(), states.end(), is_it)) continue;
    const auto domain = open_one(api, *each, options);
    std::string facts = domain.ok() ? (*domain)->facts() : std::string();
    if (domain.ok() && only_by_name(api, name)) facts += "; only by name";
    states.push_back({name, std::move(facts), domain.status()});
  }
  return states;
}

Result<std::shared_ptr<Domain>> Domain::open(const TransportOptions& options) {
  const auto loaded = fabric::api();
  if (!loaded.ok()) return loaded.status();
  const Api& api = **loaded;
  const std::string fix = "choose another provider (KVLINK_FABRIC_PROVIDER); fi_info lists them";
  int error = 0;
  const OwnedInfo all = ask(api, options.fabric_provider, {}, error);
  std::string why = all ? "" : failed(api, "none reads the memory of peers", error);
  std::set<std::string> tried;  // those over IP come once an address
  for (const fi_info* each = all.get(); each; each = each->next) {
    const std::string name = each->fabric_attr->prov_name;
    if (is_ip(*each) && !tried.insert(name).second) continue;
    if (options.fabric_provider.empty() && only_by_name(api, name)) continue;
    auto domain = open_one(api, *each, options);
    if (domain.ok()) return domain;
    const std::string reason = name + " " + domain.status().what();
    if (why.find(reason) == std::string::npos) why += (why.empty() ? "" : "; ") + reason;
  }
  const std::string wanted = options.fabric_provider.empty() ? "" : " \"" + options.fabric_provider + "\"";
  return Status::Unavailable("no provider" + wanted + " of libfabric serves kvlink: " + why, fix);
}

OpLimits Domain::limits() const {
  const fi_tx_attr& tx = *info_->tx_attr;
  return {.ops = static_cast<uint32_t>(std::clamp<size_t>(tx.size, 1, kMostOps)),
          .pieces = static_cast<uint32_t>(std::clamp<size_t>(tx.iov_limit, 1, kMostPieces)),
          .bytes = std::min<uint64_t>(std::max<uint64_t>(info_->ep_attr->max_msg_size, 1), kMostBytes)};
}

Result<Port> Domain::open_port(size_t num_ops) const {
  const auto refuse = [this](const char* what, int error) {
    return Status::Unavailable(failed(api_, provider_ + " cannot make " + what, error),
                               "raise the limits of descriptors and of locked memory (ulimit -n, ulimit -l)");
  };
  Port port;
  fi_cq_attr queue{};
  queue.size = 2 * num_ops;
  queue.format = FI_CQ_FORMAT_CONTEXT;
  queue.wait_obj = FI_WAIT_FD;
  if (::fi_cq_open(domain_.get(), &queue, port.cq.out(), nullptr) != 0 ||
      ::fi_control(&port.cq.get()->fid, FI_GETWAIT, &port.wait_fd) != 0) {
    port.cq.reset();
    port.wait_fd = -1;
    queue.wait_obj = FI_WAIT_NONE;
    if (const int error = ::fi_cq_open(domain_.get(), &queue, port.cq.out(), nullptr); error != 0)
      return refuse("a completion queue", error);
  }
  fi_av_attr peers{};
  peers.type = info_->domain_attr->av_type == FI_AV_MAP ? FI_AV_MAP : FI_AV_TABLE;
  if (const int error = ::fi_av_open(domain_.get(), &peers, port.av.out(), nullptr); error != 0)
    return refuse("a table of addresses", error);
  int error = ::fi_endpoint(domain_.get(), info_.get(), port.ep.out(), nullptr);
  if (error == 0) error = ::fi_ep_bind(port.ep.get(), &port.av.get()->fid, 0);
  if (error == 0) error = ::fi_ep_bind(port.ep.get(), &port.cq.get()->fid, FI_TRANSMIT | FI_RECV);
  if (error == 0) error = ::fi_enable(port.ep.get());
  if (error != 0) return refuse("an endpoint", error);
  return port;
}

Result<std::string> Domain::name_of(const Port& port) const {
  std::string name(256, '\0');
  size_t bytes = name.size();
  if (const int error = ::fi_getname(&port.ep.get()->fid, name.data(), &bytes); error != 0)
    return Status::Unavailable(failed(api_, provider_ + " does not tell its address", error), {});
  name.resize(bytes);
  return name;
}

Result<Owned<fid_mr>> Domain::register_memory(const void* base, size_t bytes, uint64_t access) const {
  Owned<fid_mr> made;
  int error = 0;
  const uint64_t key_bits = 8 * info_->domain_attr->mr_key_size;
  // A process with the key can read the memory, so keys are random. rxm also reconnects, without notice, to
  // any process that has taken over the port, where sequential keys would be valid.
  for (int attempt = 0; attempt < 8; ++attempt) {
    const uint64_t key = key_bits < 64 ? random_u64() & ((uint64_t{1} << key_bits) - 1) : random_u64();
    error = ::fi_mr_reg(domain_.get(), base, bytes, access, 0, key, 0, made.out(), nullptr);
    if (error != -FI_ENOKEY) break;
  }
  if (error == 0) return made;
  return Status::Unavailable(
      failed(api_, provider_ + " cannot register " + std::to_string(bytes) + " bytes", error),
      "raise the locked memory limit (ulimit -l unlimited; LimitMEMLOCK=infinity for a service; --ulimit "
      "memlock=-1 for a container)");
}

Result<Owned<fid_mr>> Domain::export_memory(const MemoryRange& range, Access access, const Port& port,
                                            RemoteRegion& region) const {
  auto made = register_memory(range.base, range.bytes, access_of(access));
  if (!made.ok()) return made;
  const auto mode = static_cast<uint64_t>(info_->domain_attr->mr_mode);
  if ((mode & FI_MR_ENDPOINT) != 0) {
    int error = ::fi_mr_bind(made->get(), &port.ep.get()->fid, 0);
    if (error == 0) error = ::fi_mr_enable(made->get());
    if (error != 0)
      return Status::Unavailable(failed(api_, provider_ + " cannot enable a region", error), {});
  }
  const uint64_t base = (mode & FI_MR_VIRT_ADDR) != 0 ? reinterpret_cast<uintptr_t>(range.base) : 0;
  region = {access, range.bytes, base, ::fi_mr_key(made->get())};
  return made;
}

Status Domain::add_local(const MemoryRange& range) {
  LocalRegion local{range.base, range.bytes, nullptr};
  std::lock_guard lock(mutex_);
  if (needs_local()) {
    auto made = register_memory(range.base, range.bytes, FI_READ);
    if (!made.ok()) return made.status();
    local.desc = ::fi_mr_desc(made->get());
    registered_.push_back(std::move(*made));
  }
  locals_.push_back(local);
  return {};
}

std::vector<LocalRegion> Domain::locals() const {
  std::lock_guard lock(mutex_);
  return locals_;
}

Result<Owned<fid_mr>> Domain::register_own(const void* base, size_t bytes) const {
  if (!needs_local()) return Owned<fid_mr>();
  return register_memory(base, bytes, FI_READ | FI_WRITE);
}

}  // namespace kvlink::fabric
