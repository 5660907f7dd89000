// SPDX-License-Identifier: Apache-2.0
// The interface by which NIXL 1.0.0 to 1.5.1 uses a backend, as its binaries have it: values, layouts and the
// order of virtual functions. tests/nixl/layouts.cc compares it with NIXL's own headers.
//
// Names are ours; NIXL finds everything by position. This code only reads what NIXL constructs.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kvlink::nixl::api {

inline constexpr int kPluginVersion = 1;

enum class Memory : uint32_t { kDram, kVram, kBlock, kObject, kFile };
enum class Operation : uint32_t { kRead, kWrite };
enum class State : int32_t {
  kInProgress = 1,
  kSuccess = 0,
  kNotPosted = -1,
  kInvalidParam = -2,
  kBackend = -3,
  kNotFound = -4,
  kMismatch = -5,
  kNotAllowed = -6,
  kRepostActive = -7,
  kUnknown = -8,
  kNotSupported = -9,
  kRemoteDisconnect = -10,
  kCanceled = -11,
};

using Params = std::unordered_map<std::string, std::string>;
using MemoryKinds = std::vector<Memory>;
using Notifications = std::vector<std::pair<std::string, std::string>>;

/// The agent passes this to a backend that it creates.
struct InitParams {
  std::string agent;
  std::string backend;
  Params* params = nullptr;
  bool has_progress_thread = false;
  uint64_t progress_delay_us = 0;
  int sync_mode = 0;
  bool telemetry = false;
};

/// A request's options.
struct Options {
  std::string notification;
  bool notifies = false;
  std::string custom;
};

/// A backend derives from these for memory and for requests. The agent only keeps the pointers.
struct Metadata {
  explicit Metadata(bool own) : is_private(own) {}
  virtual ~Metadata() = default;
  bool is_private;
};
struct Request {
  virtual ~Request() = default;
};

struct Descriptor {
  uintptr_t address;
  size_t bytes;
  uint64_t device;
};
struct BlobDescriptor : Descriptor {
  std::string blob;
};
struct MetaDescriptor : Descriptor {
  Metadata* metadata;
};

/// A list that the agent has made.
template <typename T>
struct List {
  virtual ~List() = default;
  Memory kind;
  std::vector<T> descriptors;
};
using MetaList = List<MetaDescriptor>;

struct TelemetryEvent {
  uint32_t type;
  uint64_t value;
};

/// The base of every backend. The agent reads its members by inlined functions.
class Backend {
 public:
  explicit Backend(const InitParams& params)
      : type_(params.backend), params_(*params.params), agent_(params.agent), telemetry_(params.telemetry) {}
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;
  virtual ~Backend() = default;

  virtual bool supports_remote() const = 0;
  virtual bool supports_local() const = 0;
  virtual bool supports_notifications() const = 0;
  virtual MemoryKinds memory_kinds() const = 0;
  virtual State register_memory(const BlobDescriptor& memory, const Memory& kind, Metadata*& made) = 0;
  virtual State deregister_memory(Metadata* metadata) = 0;
  virtual State connect(const std::string& agent) = 0;
  virtual State disconnect(const std::string& agent) = 0;
  virtual State unload_metadata(Metadata* metadata) = 0;
  virtual State prepare(const Operation& operation, const MetaList& local, const MetaList& remote,
                        const std::string& agent, Request*& request, const Options* options) const = 0;
  virtual State post(const Operation& operation, const MetaList& local, const MetaList& remote,
                     const std::string& agent, Request*& request, const Options* options) const = 0;
  virtual State check(Request* request) const = 0;
  virtual State release(Request* request) const = 0;
  // Views of memory for GPU kernels, which only some backends have.
  virtual State prepare_remote_view(const void* list, void*& view, const Options* options) const;
  virtual State prepare_local_view(const MetaList& list, void*& view, const Options* options) const;
  virtual void release_view(void* view) const;
  virtual State public_data(const Metadata* metadata, std::string& into) const = 0;
  virtual State connection_info(std::string& into) const = 0;
  virtual State load_connection_info(const std::string& agent, const std::string& info) = 0;
  virtual State load_remote(const BlobDescriptor& memory, const Memory& kind, const std::string& agent,
                            Metadata*& made) = 0;
  virtual State load_local(Metadata* own, Metadata*& made) = 0;
  virtual State take_notifications(Notifications& into) = 0;
  virtual State notify(const std::string& agent, const std::string& message) const = 0;
  virtual State query_memory(const List<BlobDescriptor>& memory,
                             std::vector<std::optional<Params>>& answers) const;
  virtual State estimate(const Operation& operation, const MetaList& local, const MetaList& remote,
                         const std::string& agent, Request* const& request, std::chrono::microseconds& takes,
                         std::chrono::microseconds& margin, int& method, const void* options) const;

 private:
  const std::string type_;
  const Params params_;
  std::vector<TelemetryEvent> events_;  // stays empty: its elements changed between releases
  std::mutex events_mutex_;

 protected:
  bool failed_ = false;  // the agent drops a backend that has it set

 private:
  const std::string agent_;
  const bool telemetry_;

  friend struct Layouts;  // tests/nixl/layouts.cc
};

/// nixl_plugin_init() returns this.
struct Plugin {
  int version;
  Backend* (*create)(const InitParams* params);
  void (*destroy)(Backend* backend);
  const char* (*name)();
  const char* (*version_text)();
  Params (*options)();
  MemoryKinds (*memory_kinds)();
};

}  // namespace kvlink::nixl::api
