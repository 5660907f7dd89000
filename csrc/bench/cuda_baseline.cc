// SPDX-License-Identifier: Apache-2.0
#include "bench/cuda_baseline.h"

#include "base/clock.h"
#include "device/cuda_device.h"

namespace kvlink {

Result<int64_t> baseline_cuda_copies(BaselinePieces pieces) {
  if (pieces.empty()) return Status::Config("there is nothing to copy");
  using cuda::Device;
  Result<std::shared_ptr<const Device>> device =
      Device::of(reinterpret_cast<const std::byte*>(pieces.front().to));
  if (!device.ok()) device = Device::of(reinterpret_cast<const std::byte*>(pieces.front().from));
  if (!device.ok()) return device.status();
  const cuda::Api& api = (*device)->api;
  Result<std::unique_ptr<cuda::MarkedStream>> stream = cuda::MarkedStream::open(*device);
  if (!stream.ok()) return stream.status();
  const cuda::Current current(**device);
  if (!current.status().ok()) return current.status();
  const int64_t start = now_ns();
  for (const BaselinePiece& piece : pieces) {
    const int result = api.copy(piece.to, piece.from, piece.bytes, (*stream)->get());
    if (Status status = api.check(result, "cuMemcpyAsync"); !status.ok()) return status;
  }
  const int ended = api.stream_synchronize((*stream)->get());
  if (Status status = api.check(ended, "cuStreamSynchronize"); !status.ok()) return status;
  return now_ns() - start;
}

}  // namespace kvlink
