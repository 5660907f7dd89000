// SPDX-License-Identifier: Apache-2.0
#include "channel/address.h"

#include <charconv>

namespace kvlink::channel {

Result<tcp::Address> parse_address(std::string_view text) {
  const size_t colon = text.rfind(':');
  std::string_view host = text.substr(0, colon == std::string_view::npos ? 0 : colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  const std::string_view port = colon == std::string_view::npos ? text : text.substr(colon + 1);
  tcp::Address parsed{std::string(host), 0, 0};
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), parsed.port);
  const bool is_port = error == std::errc() && end == port.data() + port.size() && parsed.port != 0;
  if (is_port && text.size() <= 64 && tcp::can_be_dialled(parsed.host)) return parsed;
  return Status::Config("an address of the native channel is not host:port, with a numeric host");
}

}  // namespace kvlink::channel
