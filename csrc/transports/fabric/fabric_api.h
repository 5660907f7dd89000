// SPDX-License-Identifier: Apache-2.0
// The functions of libfabric, loaded at run time. Its header inlines all others as calls through an object.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <memory>
#include <string>
#include <utility>

#include "base/status.h"

namespace kvlink::fabric {

/// The version of the interface that kvlink was written to, and the oldest library that it takes.
inline constexpr uint32_t kVersion = FI_VERSION(1, 17);

struct Api {
  decltype(&::fi_getinfo) getinfo;
  decltype(&::fi_freeinfo) freeinfo;
  decltype(&::fi_dupinfo) dupinfo;
  decltype(&::fi_fabric) fabric;
  decltype(&::fi_strerror) strerror;
  decltype(&::fi_version) version;
};

/// Opens the library once. Returns kTransportUnavailable and the command that installs it if it is absent.
Result<const Api*> api();

/// Returns "DOING: provider's message".
std::string failed(const Api& api, const std::string& doing, ssize_t error);

/// An object of libfabric. It is destroyed before those that it uses.
template <typename T>
class Owned {
 public:
  Owned() = default;
  Owned(Owned&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Owned() { reset(); }
  T* get() const { return object_; }
  T** out() { return &object_; }
  explicit operator bool() const { return object_ != nullptr; }
  void reset() {
    if (object_) ::fi_close(&object_->fid);
    object_ = nullptr;
  }

 private:
  T* object_ = nullptr;
};

using OwnedInfo = std::unique_ptr<fi_info, decltype(&::fi_freeinfo)>;

}  // namespace kvlink::fabric
