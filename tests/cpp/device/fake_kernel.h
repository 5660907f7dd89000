// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "device/gather_kernel.h"

namespace kvlink::testing {

/// Loads `image` into the GPU that tests/fake_cuda stands for. Returns null if it is empty.
inline std::shared_ptr<GatherKernel> fake_kernel(const std::string& image = "fake image") {
  if (image.empty()) return nullptr;
  auto loaded = GatherKernel::load(*cuda::Device::at(0), image);
  EXPECT_TRUE(loaded.ok()) << loaded.status().what();
  return *loaded;
}

}  // namespace kvlink::testing
