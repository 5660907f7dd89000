// SPDX-License-Identifier: Apache-2.0
// UCX with nothing around it: what ucx.py calls. `make peers` compiles this beside UCX, in that peer's
// environment. Every function answers null, or why it failed. Everything lives until the process ends.
#include <ucp/api/ucp.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

namespace {

struct End {
  ucp_context_h context = nullptr;
  ucp_worker_h worker = nullptr;  // one thread at a time
  ucp_mem_h memory = nullptr;
  std::byte* base = nullptr;
  std::thread answers;  // helps the other end's transfers, until this end begins its own
  std::atomic<bool> answering = true;
  bool sleeps = false;
  ucp_ep_h other = nullptr;
  ucp_rkey_h key = nullptr;
  uint64_t other_base = 0;
  size_t under_way = 0;
  ucs_status_t failed = UCS_OK;
};

const char* why_not(ucs_status_t status) { return status == UCS_OK ? nullptr : ucs_status_string(status); }

void answer(End* end) {
  while (end->answering)
    if (ucp_worker_progress(end->worker) == 0 && end->sleeps) ucp_worker_wait(end->worker);
}

void note(void* request, ucs_status_t status, void* user_data) {
  auto* const end = static_cast<End*>(user_data);
  if (status != UCS_OK) end->failed = status;
  --end->under_way;
  ucp_request_free(request);
}

ucp_request_param_t noted(End* end) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = note;
  param.user_data = end;
  return param;
}

/// Takes what a call that may go on has answered.
void begin(End* end, ucs_status_ptr_t request) {
  if (UCS_PTR_IS_ERR(request)) end->failed = UCS_PTR_STATUS(request);
  if (UCS_PTR_IS_PTR(request)) ++end->under_way;
}

const char* finish(End* end) {
  while (end->under_way > 0) ucp_worker_progress(end->worker);
  return why_not(end->failed);
}

/// Returns when the other end has everything.
const char* flush(End* end) {
  const ucp_request_param_t param = noted(end);
  begin(end, ucp_ep_flush_nbx(end->other, &param));
  return finish(end);
}

ucs_status_ptr_t get(End* end, std::byte* mine, size_t bytes, uint64_t theirs,
                     const ucp_request_param_t& param) {
  return ucp_get_nbx(end->other, mine, bytes, theirs, end->key, &param);
}

ucs_status_ptr_t put(End* end, std::byte* mine, size_t bytes, uint64_t theirs,
                     const ucp_request_param_t& param) {
  return ucp_put_nbx(end->other, mine, bytes, theirs, end->key, &param);
}

ucs_status_t open_worker(End* end) {
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_RMA | (end->sleeps ? UCP_FEATURE_WAKEUP : 0);
  if (const ucs_status_t status = ucp_init(&params, nullptr, &end->context); status != UCS_OK) return status;
  ucp_worker_params_t worker{};
  worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  return ucp_worker_create(end->context, &worker, &end->worker);
}

ucs_status_t map_memory(End* end, void* address, size_t bytes) {
  ucp_mem_map_params_t map{};
  map.field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  map.length = bytes;
  if (address == nullptr) {
    map.field_mask |= UCP_MEM_MAP_PARAM_FIELD_FLAGS;
    map.flags = UCP_MEM_MAP_ALLOCATE;
  } else {
    map.field_mask |= UCP_MEM_MAP_PARAM_FIELD_ADDRESS;
    map.address = address;
  }
  if (const ucs_status_t status = ucp_mem_map(end->context, &map, &end->memory); status != UCS_OK)
    return status;
  ucp_mem_attr_t found{};
  found.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS;
  const ucs_status_t status = ucp_mem_query(end->memory, &found);
  end->base = static_cast<std::byte*>(found.address);
  return status;
}

/// How many bytes from block `at` on adjoin at both ends; `at` becomes the first block after them.
size_t run_of(const uint64_t* there, const uint64_t* here, const uint64_t* sizes, size_t blocks, size_t& at) {
  size_t bytes = sizes[at];
  const size_t first = at++;
  for (; at < blocks && there[at] == there[first] + bytes && here[at] == here[first] + bytes; ++at) {
    bytes += sizes[at];
  }
  return bytes;
}

}  // namespace

extern "C" {

/// `address`: memory to register, or null where UCX is to allocate it; `base` is where it lies. An end that
/// sleeps wakes up when it is asked for help, another keeps asking itself.
const char* ucx_open(void* address, size_t bytes, bool sleeps, End** end, void** base) {
  auto* const made = new End;
  made->sleeps = sleeps;
  if (const ucs_status_t status = open_worker(made); status != UCS_OK) return why_not(status);
  if (const ucs_status_t status = map_memory(made, address, bytes); status != UCS_OK) return why_not(status);
  *end = made;
  *base = made->base;
  return nullptr;
}

/// Gives the data that the other end needs, which stays with UCX, and begins to answer.
const char* ucx_card(End* end, void** worker, size_t* worker_bytes, void** key, size_t* key_bytes) {
  ucp_address_t* address = nullptr;
  if (const ucs_status_t status = ucp_worker_get_address(end->worker, &address, worker_bytes);
      status != UCS_OK)
    return why_not(status);
  *worker = address;
  if (const ucs_status_t status = ucp_rkey_pack(end->context, end->memory, key, key_bytes); status != UCS_OK)
    return why_not(status);
  end->answers = std::thread(answer, end);
  return nullptr;
}

/// Ends answering and meets the other end, whose memory begins at `base`.
const char* ucx_connect(End* end, const void* worker, const void* key, uint64_t base) {
  end->answering = false;
  if (end->sleeps) ucp_worker_signal(end->worker);
  end->answers.join();
  ucp_ep_params_t other{};
  other.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
  other.address = static_cast<const ucp_address_t*>(worker);
  if (const ucs_status_t status = ucp_ep_create(end->worker, &other, &end->other); status != UCS_OK)
    return why_not(status);
  if (const ucs_status_t status = ucp_ep_rkey_unpack(end->other, key, &end->key); status != UCS_OK)
    return why_not(status);
  end->other_base = base;
  return flush(end);
}

/// Starts to move all blocks here, or there for an end that pushes. `there` and `here` are where they begin
/// in the memories. One operation for blocks that adjoin at both ends.
const char* ucx_start(End* end, const uint64_t* there, const uint64_t* here, const uint64_t* sizes,
                      size_t blocks, bool push) {
  ucp_request_param_t param = noted(end);
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH | (blocks > 1 ? UCP_OP_ATTR_FLAG_MULTI_SEND : 0);
  param.memh = end->memory;
  const auto move = push ? put : get;
  for (size_t at = 0; at < blocks && end->failed == UCS_OK;) {
    const size_t first = at, bytes = run_of(there, here, sizes, blocks, at);
    begin(end, move(end, end->base + here[first], bytes, end->other_base + there[first], param));
  }
  return why_not(end->failed);
}

/// Returns when the bytes of all that was started are where they should be.
const char* ucx_finish(End* end, bool push) { return push ? flush(end) : finish(end); }

}  // extern "C"
