// SPDX-License-Identifier: Apache-2.0
#include "device/gather_tables.h"

namespace kvlink {

Result<std::shared_ptr<CudaTables>> CudaTables::make(std::shared_ptr<const cuda::Device> device,
                                                     uint32_t num_tables, uint32_t pieces_each) {
  const cuda::Current current(*device);
  if (!current.status().ok()) return current.status();
  std::shared_ptr<CudaTables> tables(new CudaTables(std::move(device), pieces_each));
  if (Status status = tables->allocate(num_tables); !status.ok()) return status;
  return tables;
}

Status CudaTables::allocate(uint32_t num_tables) {
  const uint64_t table_bytes = uint64_t{pieces_each_} * sizeof(GatherPiece);
  const uint64_t bytes = num_tables * table_bytes;
  const cuda::Api& api = device_->api;
  Result<std::shared_ptr<HostMemory>> memory = HostMemory::allocate(bytes, false);
  if (!memory.ok()) return memory.status();
  std::byte* const base = (*memory)->range().base;
  Status status = api.check(api.host_register(base, bytes, cuda::kPortable), "cuMemHostRegister");
  if (!status.ok()) return status;
  pinned_ = std::move(*memory);
  status = api.check(api.memory_alloc(&on_device_, bytes), "cuMemAlloc");
  if (!status.ok()) return status;
  for (uint64_t at = 0; at < bytes; at += table_bytes) {
    tables_.push_back({reinterpret_cast<GatherPiece*>(base + at), on_device_ + at});
  }
  for (Table& table : tables_) free_.push_back(&table);
  return {};
}

CudaTables::~CudaTables() {
  const cuda::Current current(*device_);
  if (on_device_ != 0) device_->api.memory_free(on_device_);
  if (pinned_) device_->api.host_unregister(pinned_->range().base);
}

CudaTables::Held CudaTables::take() {
  std::lock_guard lock(mutex_);
  if (free_.empty()) return {nullptr, {this}};
  Table* const table = free_.back();
  free_.pop_back();
  return {table, {this}};
}

void CudaTables::release(Table* table) {
  std::lock_guard lock(mutex_);
  free_.push_back(table);
}

}  // namespace kvlink
