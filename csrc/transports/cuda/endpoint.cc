// SPDX-License-Identifier: Apache-2.0
#include "transports/cuda/endpoint.h"

#include <algorithm>

#include "memory/streaming_copy.h"

namespace kvlink {
namespace {

constexpr uint32_t kDepth = 2;  // one post on the device, one behind it

std::byte* local_address(uint64_t address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace

Status CudaEndpoint::establish(std::string_view reply, const Patience& patience) {
  if (Status status = client_.establish(reply, patience); !status.ok()) return status;
  Result<std::unique_ptr<cuda::MarkedStream>> stream = cuda::MarkedStream::open(gather_->device());
  if (!stream.ok()) return stream.status();
  stream_ = std::move(*stream);
  Status status = look_.open(client_.wake_fd());
  // A whole pull is one launch until its pieces fill a table. Several streams gained nothing.
  traits_ = {.window = {.chunk_bytes = 1 << 30,
                        .chunk_ops = tables_->pieces_each() / 2,
                        .depth = kDepth,
                        .stripe_bytes = UINT64_MAX},
             .ordered = true,
             .supports_repeats = true,
             .device_driven = true,
             .wake_fd = look_.fd()};
  return status;
}

Result<uint32_t> CudaEndpoint::import_region(std::string_view remote_key) {
  Result<CudaKey> key = CudaKey::parse(remote_key);
  if (!key.ok()) return key.status();
  if (key->kind == CudaKey::Kind::kHost) return import_host(*key);
  const Result<UniqueFd> deed = client_.take(key->deed_offer());
  if (!deed.ok()) return deed.status();
  if (!file_has((*deed).get(), key->deed_blob())) {
    return Status::AccessDenied("the owner's process does not export the region of this key");
  }
  Result<std::unique_ptr<CudaMapping>> mapping = CudaMapping::make(gather_->device(), *key, client_);
  if (!mapping.ok()) return mapping.status();
  owner_may_free_ = owner_may_free_ || (*mapping)->ends_with_owner();
  if (!(*mapping)->same_gpu()) link_ = GatherLink::kPeer;
  mappings_.push_back(std::move(*mapping));
  remote_on_device_.push_back(true);
  return remotes_.add({mappings_.back()->address(), key->bytes, Access::kRead});
}

Result<uint32_t> CudaEndpoint::import_host(const CudaKey& key) {
  const FdOffer& wanted = key.parts.front();
  Result<MemfdMapping> mapping = MemfdMapping::make(client_, wanted);
  if (!mapping.ok()) return mapping.status();
  host_mappings_.push_back(std::move(*mapping));
  remote_on_device_.push_back(false);
  return remotes_.add({host_mappings_.back().address(), wanted.bytes, wanted.access});
}

Status CudaEndpoint::post_read(uint64_t token, const Chunk& chunk) {
  if (!broken_.ok()) return broken_;
  const Result<uint64_t> bytes = remotes_.check_repeated(chunk);
  if (!bytes.ok()) return bytes.status();
  const bool on_device = remote_on_device_[chunk.ops.front().region];
  if (Status status = check_kind(chunk, on_device); !status.ok()) return status;
  Post& post = posts_.emplace_back();
  post.token = token;
  post.chunk = chunk;
  post.bytes = *bytes / (1 + chunk.repeats.size());
  post.on_device = on_device;
  return {};
}

/// Returns an error unless the GPU copies from device to device, or the CPU from host to host.
Status CudaEndpoint::check_kind(const Chunk& chunk, bool on_device) const {
  for (const ReadOp& op : chunk.ops) {
    bool same = remote_on_device_[op.region] == on_device;
    for (uint32_t i = 0; i < op.num_segments; ++i) {
      const uint32_t region = chunk.segments[op.first_segment + i].region;
      same = same && (region < local_on_device_.size() && local_on_device_[region]) == on_device;
    }
    if (!same) return Status::Config("a read goes from GPU to GPU memory, or from host to host memory");
  }
  if (chunk.repeats.size() * sizeof(GatherRepeat) > tables_->pieces_each() * sizeof(GatherPiece) / 2) {
    return Status::Config(std::to_string(chunk.repeats.size()) + " planes are too many");
  }
  for (const Repeat& repeat : chunk.repeats) {
    const bool to_device =
        repeat.local_region < local_on_device_.size() && local_on_device_[repeat.local_region];
    if (!on_device || !remote_on_device_[repeat.region] || !to_device) {
      return Status::Config("repeated reads go from GPU to GPU memory");
    }
  }
  return {};
}

Status CudaEndpoint::post_write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value) {
  if (!broken_.ok()) return broken_;
  if (Status status = remotes_.check_write(region, offset); !status.ok()) return status;
  Post& post = posts_.emplace_back();
  post.token = token;
  post.region = region;
  post.offset = offset;
  post.value = value;
  return {};
}

/// Writes the rest of the post into `table` as far as it fits, and all its repeats behind it.
GatherList CudaEndpoint::fill(Post& post, CudaTables::Table& table) const {
  const std::span<const Repeat> repeats = post.chunk.repeats;
  const auto behind = static_cast<uint32_t>(
      (repeats.size() * sizeof(GatherRepeat) + sizeof(GatherPiece) - 1) / sizeof(GatherPiece));
  const uint32_t most = gather_->most_piece_bytes(), room = tables_->pieces_each() - behind;
  const uint64_t before = post.at.moved;
  GatherList list{.num_repeats = static_cast<uint32_t>(repeats.size()), .link = link_};
  while (list.num_pieces < room && post.unlaunched()) {
    const ReadOp& op = post.chunk.ops[post.at.op];
    const Segment& segment = post.chunk.segments[op.first_segment + post.at.segment];
    const uint32_t bytes = std::min(segment.bytes - post.at.in_segment, most);
    table.pieces[list.num_pieces++] = {remotes_[op.region].address + op.offset + post.at.in_op,
                                       cuda::address_of(segment.local + post.at.in_segment), bytes, 0};
    post.at.advance(op, segment, bytes);
  }
  list.bytes = post.at.moved - before;
  auto* out = reinterpret_cast<GatherRepeat*>(table.pieces + list.num_pieces);
  const uint64_t first = remotes_[post.chunk.ops.front().region].address;
  for (const Repeat& repeat : repeats) {
    *out++ = {remotes_[repeat.region].address - first + repeat.offset, static_cast<uint64_t>(repeat.local)};
  }
  return list;
}

Status CudaEndpoint::launch(Post& post, CudaTables::Held table) {
  const cuda::Current current(*gather_->device());
  if (!current.status().ok()) return current.status();
  const GatherList list = fill(post, *table);
  Status status = gather_->start(*table, list, stream_->get());
  if (!status.ok()) {
    stream_->drain();
    return status;
  }
  const Result<uint64_t> number = stream_->mark();
  if (!number.ok()) return number.status();
  post.launched.push_back({*number, std::move(table)});
  return {};
}

/// Returns whether there is something to launch. A launch waits for earlier posts of the CPU.
bool CudaEndpoint::can_launch() const {
  for (const Post& post : posts_) {
    if (!post.on_device) return false;
    if (post.unlaunched()) return true;
  }
  return false;
}

bool CudaEndpoint::launch_all() {
  bool any = false;
  // An owner closes before it frees.
  if (owner_may_free_ && broken_.ok() && can_launch()) check_owner();
  starved_ = false;
  for (Post& post : posts_) {
    if (!post.on_device) break;
    while (post.unlaunched()) {
      CudaTables::Held table = tables_->take();
      starved_ = !table;
      if (starved_) return any;
      if (Status status = launch(post, std::move(table)); !status.ok()) {
        break_down(Status::Unreachable("the GPU does not copy: " + status.what()));
        return true;
      }
      any = true;
    }
  }
  return any;
}

/// Returns whether all of a device's post has landed. Returns tables on the way.
Result<bool> CudaEndpoint::ended(Post& post) {
  while (!post.launched.empty()) {
    const Result<bool> done = stream_->done(post.launched.front().number);
    if (!done.ok() || !*done) return done;
    post.launched.pop_front();
  }
  return !post.unlaunched();
}

void CudaEndpoint::execute(const Post& post) {
  if (post.chunk.ops.empty()) {
    store_word(local_address(remotes_[post.region].address + post.offset), post.value);
    return;
  }
  ChunkCursor at;
  walk(post.chunk, at, post.bytes, [&](const ReadOp& op, uint32_t in_op, std::byte* local, uint32_t bytes) {
    copy_shared(local, local_address(remotes_[op.region].address + op.offset + in_op), bytes);
    return true;
  });
}

PollResult CudaEndpoint::poll(int64_t now_ns, bool, std::vector<Completion>& ended_now) {
  if (broken_.ok()) notice_owner(now_ns);
  const size_t num_ended = ended_now.size();
  bool progressed = launch_all();
  while (broken_.ok() && !posts_.empty()) {
    Post& post = posts_.front();
    if (post.on_device) {
      const Result<bool> landed = ended(post);
      if (!landed.ok()) {
        break_down(Status::Unreachable("the GPU is lost: " + landed.status().what()));
        break;
      }
      if (!*landed) break;
    } else {
      execute(post);
    }
    ended_now.push_back({post.token, {}});
    posts_.pop_front();
    progressed |= launch_all();
  }
  progressed |= ended_now.size() > num_ended;
  if (progressed) look_.progressed();
  return {broken_, progressed};
}

bool CudaEndpoint::cancel(uint64_t token) {
  const auto post =
      std::find_if(posts_.begin(), posts_.end(), [token](const Post& one) { return one.token == token; });
  if (post == posts_.end()) return true;
  if (!post->launched.empty()) {
    post->bytes = post->at.moved;  // no more of it is launched
    return false;
  }
  posts_.erase(post);
  return true;
}

void CudaEndpoint::notice_owner(int64_t now_ns) {
  if (owner_checks_.due(now_ns)) check_owner();
}

void CudaEndpoint::check_owner() {
  if (Status status = client_.check_owner(); !status.ok()) break_down(std::move(status));
}

/// On return nothing is under way, so mappings may be removed.
void CudaEndpoint::break_down(Status why) {
  if (broken_.ok()) broken_ = std::move(why);
  if (stream_) stream_->drain();
  posts_.clear();
}

bool CudaEndpoint::arm() {
  if ((can_launch() && !starved_) || (!posts_.empty() && !posts_.front().on_device)) return false;
  look_.arm(!posts_.empty());
  return true;
}

void CudaEndpoint::close() {
  break_down(Status::Unreachable("this cuda endpoint was closed"));
  client_.close();
  mappings_.clear();
  host_mappings_.clear();
  stream_.reset();
  look_.close();
}

}  // namespace kvlink
