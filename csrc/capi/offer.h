// SPDX-License-Identifier: Apache-2.0
// Offers of the program: blocks under a lease, and the ticket of it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "capi/worker.h"
#include "codec/ticket.h"

namespace kvlink::capi {

class Offer final : public Object {
 public:
  static constexpr Kind kKind = Kind::kOffer;
  /// Grants the lease, whose number is the handle.
  static Outcome open(const std::shared_ptr<Worker>& worker, const kvl_offer_options* options,
                      kvl_handle& handle);
  Offer(std::shared_ptr<Worker> worker, std::string ticket)
      : Object(kKind, std::move(worker)), ticket_(std::move(ticket)) {}

  const std::string& ticket() const { return ticket_; }

 private:
  const std::string ticket_;
};

}  // namespace kvlink::capi
