// SPDX-License-Identifier: Apache-2.0
// A simulated endpoint: how long its owner takes, in which order it answers, whether it answers at all and
// when the connection breaks are drawn from the seed. It checks the contract of transport_api/transport.h
// from the other side.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "device/device_copier.h"
#include "owner.h"
#include "scheduler.h"
#include "transport_api/transport.h"

namespace kvlink::simulation {

/// Properties in which transports differ.
enum class Manner : uint8_t {
  kStream,  // tcp: sends in poll(), the descriptor is readable while bytes wait, reads can be called back
  kQueue,  // a NIC: bytes land at any time, the descriptor tells once after arm(), nothing can be called back
  kLaunch,  // a GPU: as a NIC, and pulls are posted on the calling thread
  kCopy,    // poll() copies a slice each time, reads can be called back
};

struct EndpointPlan {
  Manner manner = Manner::kStream;
  bool ordered = true;
  Window window;
  std::string path = {};
  int64_t delay_ns = 20'000;  // of an answer, about
  // Times of faults; INT64_MAX: never.
  int64_t breaks_at_ns = INT64_MAX;   // poll() says so, and the descriptor
  int64_t silent_at_ns = INT64_MAX;   // what is to end later than this never does
  uint32_t refused_percent = 0;       // of the reads, by their completion
  uint32_t failed_post_percent = 0;   // of the reads, at once
  uint32_t failed_write_percent = 0;  // of the stores: half of them at once, the others never arrive
  bool breaks_order = false;          // though it promises it

  bool healthy() const { return breaks_at_ns == INT64_MAX && silent_at_ns == INT64_MAX && !refuses(); }
  bool refuses() const { return refused_percent + failed_post_percent + failed_write_percent > 0; }
  bool recalls() const { return manner == Manner::kStream || manner == Manner::kCopy; }
};

class SimulatedEndpoint final : public Endpoint {
 public:
  struct Observer {
    std::function<void(const std::byte* at)> landing;  // before they do
    std::function<void()> quiet;                       // the last post ended
  };

  SimulatedEndpoint(Owner& owner, const EndpointPlan& plan, Observer observer);

  std::string hello() const override { return "hello"; }
  Status establish(std::string_view, const Patience&) override { return {}; }
  Result<uint32_t> import_region(std::string_view) override { return num_regions_++; }
  const Traits& traits() const override { return traits_; }
  Status post_read(uint64_t token, const Chunk& chunk) override;
  Status post_write(uint64_t token, uint32_t region, uint64_t offset, uint64_t value) override;
  PollResult poll(int64_t now_ns, bool waiting, std::vector<Completion>& ended) override;
  bool cancel(uint64_t token) override;
  bool arm() override;
  void close() override;

  /// Counts what is under way, also when the endpoint is gone.
  std::function<size_t()> counter() const {
    return [state = state_] { return state->posts.size(); };
  }
  struct Work {
    size_t reads = 0, stores = 0, num_looks = 0;    // posted; of reads, those of blocks
    std::map<const std::byte*, size_t> looks = {};  // reads of slots that were answered, by their destination
  };
  /// Returns what it was asked for, also when the endpoint is gone.
  std::shared_ptr<const Work> work() const { return {state_, &state_->work}; }

 private:
  struct Piece {
    std::byte* local;
    uint32_t bytes, region;
    uint64_t offset;
  };
  struct Post {
    uint64_t number;  // of this endpoint; a token is used many times
    uint64_t token;
    std::vector<Piece> pieces;  // none: a write
    uint64_t offset = 0, value = 0;
    uint32_t region = 0;
    bool sent = false, ended = false;
    Status status = {};
    size_t num_landed = 0;
  };
  /// Outlives the endpoint in events.
  struct State {
    std::vector<Post> posts;
    bool closed = false, broken = false, armed = false;
    int64_t last_poll_ns = 0;
    Work work;
    Post* find(uint64_t number);
  };
  class Call;

  Status add(Post post);
  void send(Post& post);
  void finish(State& state, uint64_t number);
  void land(Post& post, size_t most_pieces);
  void tell(State& state);
  void watch(uint64_t number);
  void note_look(const Post& post);
  bool faulty(uint32_t percent);
  int64_t due_ns(bool of_store);

  Owner& owner_;
  const EndpointPlan plan_;
  const Observer observer_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
  const int fd_;
  const Traits traits_;
  uint32_t num_regions_ = 0;
  uint64_t num_posted_ = 0;
  int64_t last_due_ns_ = 0;  // of what later posts must not overtake
  bool inside_ = false;
};

/// Copies from slots to blocks, late and in any order. `landing` is told before bytes arrive.
std::shared_ptr<DeviceCopier> make_copier(std::function<void(const std::byte* at)> landing);

}  // namespace kvlink::simulation
