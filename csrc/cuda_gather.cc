// SPDX-License-Identifier: Apache-2.0
#include "cuda_gather.h"

namespace kvlink {
namespace {

constexpr unsigned kThreads = 128;  // of one block, for one piece: two 16-byte loads each for 4 KiB
constexpr uint32_t kFew = 4;        // copied one by one: cheaper than to fill and send a table
constexpr uint64_t kTableBytes = uint64_t{CudaGather::kTablePieces} * sizeof(GatherPiece);

}  // namespace

Result<std::shared_ptr<CudaGather>> CudaGather::make(std::shared_ptr<const cuda::Device> device,
                                                     std::string_view image) {
  const cuda::Current current(*device);
  if (!current.status().ok()) return current.status();
  std::shared_ptr<CudaGather> gather(new CudaGather(std::move(device)));
  Status status = gather->load(image);
  if (status.ok()) status = gather->make_tables();
  return status.ok() ? Result<std::shared_ptr<CudaGather>>(std::move(gather)) : status;
}

CudaGather::~CudaGather() {
  const cuda::Current current(*device_);
  const cuda::Api& api = device_->api;
  if (on_device_ != 0) api.memory_free(on_device_);
  if (pinned_) api.host_unregister(pinned_->range().base);
  if (module_) api.module_unload(module_);
}

Status CudaGather::load(std::string_view image) {
  if (image.empty()) return {};
  const cuda::Api& api = device_->api;
  const Status status = api.check(api.module_load(&module_, image.data()), "cuModuleLoadData");
  if (!status.ok()) return status;
  return api.check(api.module_get_function(&function_, module_, "kvlink_gather"), "cuModuleGetFunction");
}

Status CudaGather::make_tables() {
  const cuda::Api& api = device_->api;
  Result<std::shared_ptr<HostMemory>> memory = HostMemory::allocate(kNumTables * kTableBytes, false);
  if (!memory.ok()) return memory.status();
  std::byte* const base = (*memory)->range().base;
  const int pinned = api.host_register(base, kNumTables * kTableBytes, cuda::kPortable);
  Status status = api.check(pinned, "cuMemHostRegister");
  if (!status.ok()) return status;
  pinned_ = std::move(*memory);
  status = api.check(api.memory_alloc(&on_device_, kNumTables * kTableBytes), "cuMemAlloc");
  if (!status.ok()) return status;
  for (uint64_t at = 0; at < kNumTables * kTableBytes; at += kTableBytes) {
    tables_.push_back({reinterpret_cast<GatherPiece*>(base + at), on_device_ + at});
  }
  for (Table& table : tables_) free_.push_back(&table);
  return {};
}

CudaGather::TableLoan CudaGather::take() {
  std::lock_guard lock(mutex_);
  if (free_.empty()) return {nullptr, {this}};
  Table* const table = free_.back();
  free_.pop_back();
  return {table, {this}};
}

void CudaGather::give_back(Table* table) {
  std::lock_guard lock(mutex_);
  free_.push_back(table);
}

const char* CudaGather::way() const {
  return function_ ? "kernel" : device_->api.copy_batch ? "batch" : "copies";
}

Status CudaGather::start(Table& table, uint32_t count, cuda::Stream stream) const {
  const std::span<const GatherPiece> pieces(table.pieces, count);
  if (count <= kFew) return copy_each(pieces, stream);
  if (function_) return launch(table, count, stream);
  return device_->api.copy_batch ? copy_batch(pieces, stream) : copy_each(pieces, stream);
}

Status CudaGather::launch(const Table& table, uint32_t count, cuda::Stream stream) const {
  const cuda::Api& api = device_->api;
  const int sent = api.copy_to_device(table.on_device, table.pieces, count * sizeof(GatherPiece), stream);
  if (Status status = api.check(sent, "cuMemcpyHtoDAsync"); !status.ok()) return status;
  cuda::Address pieces = table.on_device;
  void* arguments[] = {&pieces};
  const int launched = api.launch(function_, count, 1, 1, kThreads, 1, 1, 0, stream, arguments, nullptr);
  return api.check(launched, "cuLaunchKernel");
}

Status CudaGather::copy_batch(std::span<const GatherPiece> pieces, cuda::Stream stream) const {
  std::vector<cuda::Address> to, from;
  std::vector<size_t> bytes;
  for (const GatherPiece& piece : pieces) {
    to.push_back(piece.to);
    from.push_back(piece.from);
    bytes.push_back(piece.bytes);
  }
  cuda::CopyAttributes attributes{cuda::kInStreamOrder, {}, {}, 0};
  size_t first = 0;
  const cuda::Api& api = device_->api;
  const int result =
      api.copy_batch(to.data(), from.data(), bytes.data(), pieces.size(), &attributes, &first, 1, stream);
  return api.check(result, "cuMemcpyBatchAsync");
}

Status CudaGather::copy_each(std::span<const GatherPiece> pieces, cuda::Stream stream) const {
  const cuda::Api& api = device_->api;
  for (const GatherPiece& piece : pieces) {
    const int result = api.copy_on_device(piece.to, piece.from, piece.bytes, stream);
    if (Status status = api.check(result, "cuMemcpyDtoDAsync"); !status.ok()) return status;
  }
  return {};
}

}  // namespace kvlink
