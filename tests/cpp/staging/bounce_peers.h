// SPDX-License-Identifier: Apache-2.0
// The two ends of a transport where the memory at one of them is a device's, for tests.
#pragma once

#include "cpp/device/fake_device.h"
#include "cpp/transports/copy_peers.h"
#include "staging/bounce_buffer.h"

namespace kvlink::testing {

inline constexpr uint32_t kDeviceRegion = 0, kHostRegion = 1;                     // of a DeviceReader
inline constexpr size_t kSlots = Bounce::kLeastBytes / SlotRing::kSlotBytes / 2;  // each way

inline std::unique_ptr<Transport> must_make(const std::string& name, const std::string& fault = {}) {
  TransportOptions options;
  options.fault = fault;
  auto made = make_transport(name, options);
  EXPECT_TRUE(made.ok()) << made.status().what();
  return std::move(*made);
}

inline std::shared_ptr<Bounce> must_make(FakeDevice& device, uint64_t bytes = Bounce::kLeastBytes) {
  auto made = Bounce::make(device.range().base, bytes, device.maker());
  EXPECT_TRUE(made.ok()) << made.status().what();
  EXPECT_LE(device.pinned_bytes(), bytes);
  return *made;
}

/// Reads into device memory, which is poisoned.
struct DeviceReader {
  using Accept = std::function<std::string(const std::string& hello)>;

  DeviceReader(FakeDevice& device, std::shared_ptr<Bounce> bounce, const std::string& name, const Card& card,
               const Accept& accept, const std::string& fault = {})
      : device(device) {
    device.fill(kPoison);
    auto wrapped = bounce_wrap(must_make(name, fault), std::move(bounce), 1, {});
    EXPECT_TRUE(wrapped.ok()) << wrapped.status().what();
    transport = std::move(*wrapped);
    auto opened = open_one(*transport, card.address);
    EXPECT_TRUE(opened.ok()) << opened.status().what();
    endpoint = std::move(*opened);
    const Status status = endpoint->establish(accept(endpoint->hello()), 20 * kSecondNs);
    EXPECT_TRUE(status.ok()) << status.what();
    EXPECT_EQ(*endpoint->import_region(card.pool_key), kPool);
    EXPECT_EQ(*endpoint->import_region(card.table_key), kTable);
    if (!card.words_key.empty()) {
      EXPECT_EQ(*endpoint->import_region(card.words_key), kWords);
    }
  }

  /// Sleeps as the engine does, so that what never wakes fails the test. Ends as Reader::wait does.
  Status wait(uint64_t token) {
    for (const int64_t deadline = now_ns() + 20 * kSecondNs; now_ns() < deadline;) {
      const PollResult result = poll_once(*endpoint, ended);
      for (const Completion& completion : ended) {
        if (completion.token == token) return completion.status;
      }
      if (!result.status.ok()) return result.status;
      if (result.progressed || !endpoint->arm()) continue;
      pollfd asleep{endpoint->traits().wake_fd, POLLIN, 0};
      ::poll(&asleep, 1, 1000);
    }
    return Status::Timeout("the test waited in vain");
  }
  Status read(const Scatter& scatter, uint64_t token = 7) {
    Status status = endpoint->post_read(token, scatter.chunk());
    return status.ok() ? wait(token) : status;
  }
  void poll_for(int64_t ns) {
    for (const int64_t end = now_ns() + ns; now_ns() < end;) {
      if (!poll_once(*endpoint, ended).status.ok()) return;
    }
  }
  bool is_poisoned() {
    const std::vector<std::byte> now = device.contents();
    return std::all_of(now.begin(), now.end(), [](std::byte one) { return one == kPoison; });
  }

  FakeDevice& device;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<Endpoint> endpoint;
  std::vector<Completion> ended;
};

/// An owner of host memory, here, and a reader with a device.
struct DevicePair {
  explicit DevicePair(const std::string& name, const std::string& fault = {},
                      uint64_t bounce_bytes = Bounce::kLeastBytes)
      : owner(name.substr(name.find('+') + 1)),
        server(std::make_unique<Server>(*owner.transport)),
        device(kPoolBytes),
        bounce(must_make(device, bounce_bytes)),
        reader(
            device, bounce, name, owner.card(),
            [this](const std::string& hello) { return *owner.transport->accept(42, hello); }, fault) {}

  Owner owner;
  std::unique_ptr<Server> server;
  FakeDevice device;
  std::shared_ptr<Bounce> bounce;
  DeviceReader reader;
};

/// One read of `bytes` from the start of the pool to the start of the device.
inline Scatter whole(const FakeDevice& device, uint32_t bytes, uint32_t piece = 16 << 10) {
  Scatter scatter;
  for (uint32_t at = 0; at < bytes; at += piece) {
    scatter.add(kPool, at, {{device.at(at), std::min(piece, bytes - at), kDeviceRegion}});
  }
  return scatter;
}

}  // namespace kvlink::testing
