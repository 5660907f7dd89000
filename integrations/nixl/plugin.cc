// SPDX-License-Identifier: Apache-2.0
// The plugin: NIXL's calls in terms of an Agent. Nothing is thrown to NIXL, and nothing is logged but why a
// call was refused, once for each reason.
#include <array>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <set>
#include <utility>

#include "agent.h"
#include "base/process_mark.h"
#include "nixl_api.h"
#include "release.h"

namespace kvlink::nixl::api {

State Backend::prepare_remote_view(const void*, void*&, const Options*) const { return State::kNotSupported; }
State Backend::prepare_local_view(const MetaList&, void*&, const Options*) const {
  return State::kNotSupported;
}
void Backend::release_view(void*) const {}
State Backend::query_memory(const List<BlobDescriptor>&, std::vector<std::optional<Params>>&) const {
  return State::kNotSupported;
}
State Backend::estimate(const Operation&, const MetaList&, const MetaList&, const std::string&,
                        Request* const&, std::chrono::microseconds&, std::chrono::microseconds&, int&,
                        const void*) const {
  return State::kNotSupported;
}

}  // namespace kvlink::nixl::api

namespace kvlink::nixl {
namespace {

using api::Memory, api::Operation, api::State;

constexpr char kName[] = "KVLINK";
constexpr size_t kMostReasons = 64;

/// NIXL's codes have no text, so the reason goes to the standard error.
void explain(const Status& why) {
  static std::mutex mutex;
  static std::set<std::string> told;
  const std::string text = why.sentence();
  const std::lock_guard lock(mutex);
  if (told.size() < kMostReasons && told.insert(text).second)
    std::fprintf(stderr, "kvlink's NIXL plugin: %s\n", text.c_str());
}

State state_of(const Status& status) {
  if (status.ok()) return State::kSuccess;
  explain(status);
  switch (status.code()) {
    case Code::kConfig:
      return State::kInvalidParam;
    case Code::kTransportUnavailable:
      return State::kNotSupported;
    case Code::kAccessDenied:
      return State::kNotAllowed;
    case Code::kCancelled:
      return State::kCanceled;
    default:
      return State::kBackend;
  }
}

/// Runs a call of NIXL.
template <typename Call>
State guarded(Call call) noexcept {
  try {
    return call();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvlink's NIXL plugin: %s\n", error.what());
    return State::kBackend;
  }
}

struct OwnMemory final : api::Metadata {
  explicit OwnMemory(std::shared_ptr<OwnRegion> registered) : Metadata(true), region(std::move(registered)) {}
  const std::shared_ptr<OwnRegion> region;
};

struct PeerMemory final : api::Metadata {
  explicit PeerMemory(std::shared_ptr<PeerRegion> loaded) : Metadata(false), region(std::move(loaded)) {}
  const std::shared_ptr<PeerRegion> region;
};

struct Handle final : api::Request {
  explicit Handle(std::shared_ptr<nixl::Request> prepared) : request(std::move(prepared)) {}
  const std::shared_ptr<nixl::Request> request;
};

// Settings: a parameter of the backend, or a variable of the environment.

std::string setting(const api::Params& params, const char* parameter, const char* variable) {
  const auto found = params.find(parameter);
  if (found != params.end() && !found->second.empty()) return found->second;
  const char* const value = std::getenv(variable);
  return value ? value : std::string();
}

Status take_number(const std::string& text, const char* parameter, uint64_t least, uint64_t most,
                   uint64_t& into) {
  if (text.empty()) return {};
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < least || number > most) {
    return Status::Config(std::string(parameter) + "=" + text + " is not a number from " +
                          std::to_string(least) + " to " + std::to_string(most));
  }
  into = number;
  return {};
}

/// Takes "cma,tcp": these, in this order; or "^cma": all others.
void take_transports(std::string_view text, std::vector<std::string>& transports) {
  if (text.empty() || text == "all") return;
  const bool excludes = text.starts_with('^');
  if (excludes) text.remove_prefix(1);
  std::vector<std::string> named;
  while (!text.empty()) {
    const std::string_view name = text.substr(0, text.find(','));
    named.emplace_back(name);
    text.remove_prefix(std::min(text.size(), name.size() + 1));
  }
  if (!excludes) {
    std::erase(named, "shm");  // of memory that kvlink allocated, which an agent has none of
    transports = std::move(named);
    return;
  }
  std::erase_if(transports, [&named](const std::string& each) {
    return std::find(named.begin(), named.end(), each) != named.end();
  });
}

Result<Settings> settings_of(const api::InitParams& init) {
  const api::Params& params = *init.params;
  Settings settings;
  settings.agent = init.agent;
  take_transports(setting(params, "transports", "KVLINK_TRANSPORTS"), settings.transports);
  if (const std::string host = setting(params, "host", "KVLINK_HOST"); !host.empty()) settings.host = host;
  settings.advertise = setting(params, "advertise", "KVLINK_ADVERTISE");
  uint64_t port = 0, timeout_ms = 30'000;
  Status status = take_number(setting(params, "port", "KVLINK_NIXL_PORT"), "port", 0, 65'535, port);
  if (status.ok()) {
    status = take_number(setting(params, "timeout_ms", "KVLINK_NIXL_TIMEOUT_MS"), "timeout_ms", 1, 86'400'000,
                         timeout_ms);
  }
  if (!status.ok()) return status;
  settings.port = static_cast<uint16_t>(port);
  settings.timeout_ns = static_cast<int64_t>(timeout_ms) * 1'000'000;
  return settings;
}

/// A forked child has none of the threads.
struct CloseHere {
  ProcessMark process;
  void operator()(Agent* agent) const {
    if (!process.inherited()) delete agent;
  }
};

class Plugin final : public api::Backend {
 public:
  Plugin(const api::InitParams& init, std::unique_ptr<Agent> agent)
      : Backend(init), agent_(agent.release(), CloseHere()) {}

  bool supports_remote() const override { return true; }
  bool supports_local() const override { return true; }
  bool supports_notifications() const override { return true; }
  api::MemoryKinds memory_kinds() const override { return {Memory::kDram, Memory::kVram}; }

  State register_memory(const api::BlobDescriptor& memory, const Memory&, api::Metadata*& made) override {
    return guarded([&] {
      auto region = agent_->add(reinterpret_cast<std::byte*>(memory.address), memory.bytes);
      if (region.ok()) made = new OwnMemory(std::move(*region));
      return state_of(region.status());
    });
  }
  State deregister_memory(api::Metadata* metadata) override {
    return guarded([&] {
      const std::unique_ptr<OwnMemory> own(static_cast<OwnMemory*>(metadata));
      agent_->drop(own->region);
      return State::kSuccess;
    });
  }

  State connect(const std::string& agent) override {
    return guarded([&] {
      const std::shared_ptr<Peer> peer = agent_->peer(agent);
      if (!peer) return State::kNotFound;
      if (agent != agent_->name()) peer->greet();
      return State::kSuccess;
    });
  }
  State disconnect(const std::string& agent) override {
    return guarded([&] {
      agent_->forget_peer(agent);
      return State::kSuccess;
    });
  }
  State unload_metadata(api::Metadata* metadata) override {
    return guarded([&] {
      delete metadata;
      return State::kSuccess;
    });
  }

  State prepare(const Operation& operation, const api::MetaList& local, const api::MetaList& remote,
                const std::string& agent, api::Request*& request, const api::Options*) const override {
    return guarded([&] {
      if (operation != Operation::kRead) {
        return state_of(Status::Unavailable(
            "this release reads only: it refuses WRITE, and so servers that push the cache",
            "let the decode server read (NixlConnector)"));
      }
      const std::shared_ptr<Peer> peer = agent_->peer(agent);
      if (!peer) return State::kNotFound;
      const Result<std::vector<Wish>> wishes = wishes_of(local, remote);
      if (!wishes.ok()) return state_of(wishes.status());
      auto prepared = agent_->prepare(*wishes, wishes->empty() ? peer : wishes->front().from->peer);
      if (prepared.ok()) request = new Handle(std::move(*prepared));
      return state_of(prepared.status());
    });
  }
  State post(const Operation&, const api::MetaList&, const api::MetaList&, const std::string&,
             api::Request*& request, const api::Options* options) const override {
    return guarded([&] {
      std::optional<std::string> notification;
      if (options && options->notifies) notification = options->notification;
      nixl::Request& posted = *static_cast<Handle*>(request)->request;
      if (Status status = posted.post(std::move(notification)); !status.ok()) {
        explain(status);
        return State::kRepostActive;
      }
      return outcome(posted);
    });
  }
  State check(api::Request* request) const override {
    return guarded([&] { return outcome(*static_cast<Handle*>(request)->request); });
  }
  State release(api::Request* request) const override {
    return guarded([&] {
      const std::unique_ptr<Handle> handle(static_cast<Handle*>(request));
      agent_->release(handle->request);
      return State::kSuccess;
    });
  }

  State public_data(const api::Metadata* metadata, std::string& into) const override {
    return guarded([&] {
      const OwnRegion& region = *static_cast<const OwnMemory*>(metadata)->region;
      into = write_region({region.pool, region.number});
      return State::kSuccess;
    });
  }
  State connection_info(std::string& into) const override {
    return guarded([&] {
      into = agent_->info();
      return State::kSuccess;
    });
  }
  State load_connection_info(const std::string& agent, const std::string& info) override {
    return guarded([&] { return state_of(agent_->add_peer(agent, info)); });
  }
  State load_remote(const api::BlobDescriptor& memory, const Memory&, const std::string& agent,
                    api::Metadata*& made) override {
    return guarded([&] {
      const std::shared_ptr<Peer> peer = agent_->peer(agent);
      const auto name = read_region(memory.blob);
      if (!peer) return State::kNotFound;
      if (!name || memory.bytes == 0 || memory.address > UINT64_MAX - memory.bytes) {
        return state_of(Status::AccessDenied("the metadata of agent " + agent + " is forged"));
      }
      made =
          new PeerMemory(std::make_shared<PeerRegion>(PeerRegion{peer, *name, memory.address, memory.bytes}));
      return State::kSuccess;
    });
  }
  State load_local(api::Metadata* own, api::Metadata*& made) override {
    return guarded([&] {
      const OwnRegion& region = *static_cast<OwnMemory*>(own)->region;
      made = new PeerMemory(std::make_shared<PeerRegion>(PeerRegion{agent_->peer(agent_->name()),
                                                                    {region.pool, region.number},
                                                                    reinterpret_cast<uint64_t>(region.base),
                                                                    region.bytes}));
      return State::kSuccess;
    });
  }

  State take_notifications(api::Notifications& into) override {
    return guarded([&] {
      agent_->take_notifications(into);
      return State::kSuccess;
    });
  }
  State notify(const std::string& agent, const std::string& message) const override {
    return guarded([&] {
      const std::shared_ptr<Peer> peer = agent_->peer(agent);
      return peer ? state_of(peer->notify(message)) : State::kNotFound;
    });
  }

 private:
  static Result<std::vector<Wish>> wishes_of(const api::MetaList& local, const api::MetaList& remote) {
    if (local.descriptors.size() != remote.descriptors.size())
      return Status::Config("a transfer has as many descriptors at both ends");
    std::vector<Wish> wishes;
    wishes.reserve(local.descriptors.size());
    for (size_t index = 0; index < local.descriptors.size(); ++index) {
      const api::MetaDescriptor &to = local.descriptors[index], &from = remote.descriptors[index];
      if (to.bytes != from.bytes) return Status::Config("descriptors have the same bytes at both ends");
      wishes.push_back({static_cast<OwnMemory*>(to.metadata)->region,
                        static_cast<PeerMemory*>(from.metadata)->region, to.address, from.address, to.bytes});
    }
    return wishes;
  }

  static State outcome(nixl::Request& request) {
    switch (request.check()) {
      case nixl::Request::Phase::kDone:
        return State::kSuccess;
      case nixl::Request::Phase::kFailed: {
        const State state = state_of(request.failure());
        return request.peer_is_dead() ? State::kRemoteDisconnect : state;
      }
      case nixl::Request::Phase::kIdle:
      case nixl::Request::Phase::kReleased:
        return State::kNotPosted;
      default:
        return State::kInProgress;
    }
  }

  const std::unique_ptr<Agent, CloseHere> agent_;
};

api::Backend* create(const api::InitParams* init) noexcept {
  try {
    const Result<Settings> settings = settings_of(*init);
    Result<std::unique_ptr<Agent>> agent =
        settings.ok() ? Agent::make(*settings) : Result<std::unique_ptr<Agent>>(settings.status());
    if (agent.ok()) return new Plugin(*init, std::move(*agent));
    explain(agent.status());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvlink's NIXL plugin: %s\n", error.what());
  }
  return nullptr;
}

api::Params options() { return {}; }
api::MemoryKinds kinds() { return {Memory::kDram, Memory::kVram}; }

api::Plugin made{api::kPluginVersion,
                 create,
                 [](api::Backend* backend) { delete backend; },
                 [] { return kName; },
                 [] { return KVLINK_VERSION; },
                 options,
                 kinds};

}  // namespace
}  // namespace kvlink::nixl

extern "C" {

__attribute__((visibility("default"))) kvlink::nixl::api::Plugin* nixl_plugin_init() {
  const kvlink::Status known = kvlink::nixl::check_loaded_release();
  if (known.ok()) return &kvlink::nixl::made;
  kvlink::nixl::explain(known);
  return nullptr;
}

__attribute__((visibility("default"))) void nixl_plugin_fini() {}
}
