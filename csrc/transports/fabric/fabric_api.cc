// SPDX-License-Identifier: Apache-2.0
#include "transports/fabric/fabric_api.h"

#include <signal.h>

#include <array>

#include "base/dynamic_library.h"

namespace kvlink::fabric {
namespace {

const char* const kInstall = "install it: apt-get install libfabric1 (dnf install libfabric)";

/// Loading libfabric loads the libraries of Omni-Path and True Scale, which put handlers of their own on
/// these signals. A library of a Python process must not.
class KeepSignals {
 public:
  KeepSignals() {
    for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], nullptr, &before_[i]);
  }
  ~KeepSignals() {
    for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
  }
  KeepSignals(const KeepSignals&) = delete;
  KeepSignals& operator=(const KeepSignals&) = delete;

 private:
  static constexpr std::array kSignals{SIGINT, SIGTERM, SIGILL, SIGABRT, SIGBUS, SIGSEGV, SIGFPE, SIGTRAP};
  std::array<struct sigaction, kSignals.size()> before_{};
};

/// The versions of the functions whose structures the headers of libfabric 1.9 and later begin with. Later
/// versions only append to them.
Result<Api> load() {
  const KeepSignals keep;
  // AWS ships a newer one beside the distribution's.
  Result<Library> opened = Library::open(
      {"/opt/amazon/efa/lib64/libfabric.so.1", "/opt/amazon/efa/lib/libfabric.so.1", "libfabric.so.1"},
      kInstall);
  if (!opened.ok()) return opened.status();
  Library& library = *opened;
  Api api{};
  const bool complete = library.load(api.getinfo, "fi_getinfo", "FABRIC_1.3") &&
                        library.load(api.freeinfo, "fi_freeinfo", "FABRIC_1.3") &&
                        library.load(api.dupinfo, "fi_dupinfo", "FABRIC_1.3") &&
                        library.load(api.fabric, "fi_fabric", "FABRIC_1.1") &&
                        library.load(api.strerror, "fi_strerror", "FABRIC_1.0") &&
                        library.load(api.version, "fi_version", "FABRIC_1.0");
  if (complete && FI_VERSION_GE(api.version(), kVersion)) return api;
  return Status::Unavailable(library.name() + " is older than libfabric 1.17", "upgrade libfabric");
}

}  // namespace

Result<const Api*> api() {
  static const Result<Api> loaded = load();
  if (!loaded.ok()) return loaded.status();
  return &*loaded;
}

std::string failed(const Api& api, const std::string& doing, ssize_t error) {
  return doing + ": " + api.strerror(static_cast<int>(error < 0 ? -error : error));
}

}  // namespace kvlink::fabric
