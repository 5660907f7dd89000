// SPDX-License-Identifier: Apache-2.0
// Reads small files, such as those of /proc, without streams: these would bring all of libstdc++'s locales
// into a library that has it inside.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace kvlink {

/// Returns the content, or nothing if the file cannot be read.
std::optional<std::string> read_file(const std::string& path);
/// Returns what comes before the first line end, and removes both from `text`.
std::string_view take_line(std::string_view& text);

}  // namespace kvlink
