// SPDX-License-Identifier: Apache-2.0
#include "release.h"

#include <dirent.h>
#include <link.h>

#include <array>
#include <charconv>
#include <cstdlib>
#include <optional>

namespace kvlink::nixl {
namespace {

using Release = std::array<int, 3>;

std::optional<Release> parse(std::string_view text) {
  Release parsed{};
  for (int& part : parsed) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), part);
    if (error != std::errc()) return {};
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    if (&part == &parsed.back()) break;
    if (!text.starts_with('.')) return {};
    text.remove_prefix(1);
  }
  return text.empty() ? std::optional(parsed) : std::nullopt;
}

std::string_view name_in(std::string_view path) { return path.substr(path.rfind('/') + 1); }
std::string_view folder_of(std::string_view path) { return path.substr(0, path.rfind('/')); }

int find_library(dl_phdr_info* info, size_t, void* into) {
  if (name_in(info->dlpi_name) != "libnixl.so") return 0;
  *static_cast<std::string*>(into) = info->dlpi_name;
  return 1;
}

}  // namespace

std::string release_at(const std::string& library) {
  constexpr std::string_view kLibraries = ".mesonpy.libs", kInfo = ".dist-info";
  const std::string_view libraries = folder_of(library);  // site-packages/.nixl_cu12.mesonpy.libs
  std::string_view package = name_in(libraries);
  if (!package.starts_with('.') || !package.ends_with(kLibraries)) return {};
  package = package.substr(1, package.size() - 1 - kLibraries.size());
  std::string release;
  DIR* const folder = ::opendir(std::string(folder_of(libraries)).c_str());
  if (!folder) return {};
  while (const dirent* const entry = ::readdir(folder)) {
    std::string_view name = entry->d_name;
    if (!name.starts_with(package) || !name.ends_with(kInfo)) continue;
    name = name.substr(package.size(), name.size() - package.size() - kInfo.size());
    if (name.starts_with('-')) release = name.substr(1);
  }
  ::closedir(folder);
  return release;
}

Status check_release(std::string_view release) {
  const auto asked = parse(release);
  if (asked && *asked >= *parse(kOldestRelease) && *asked <= *parse(kNewestRelease)) return {};
  const std::string known = std::string(kOldestRelease) + " to " + kNewestRelease;
  if (release.empty()) {
    return Status::Unavailable(
        "kvlink's plugin cannot tell which release of NIXL loads it",
        std::string("set ") + kReleaseVariable + " to its number, if that is one of " + known);
  }
  return Status::Unavailable(
      "kvlink's plugin was compared with NIXL " + known + ", and this is " + std::string(release),
      "install one of these, or a kvlink that knows this one");
}

Status check_loaded_release() {
  if (const char* const said = std::getenv(kReleaseVariable)) return check_release(said);
  std::string library;
  ::dl_iterate_phdr(find_library, &library);
  return check_release(library.empty() ? std::string() : release_at(library));
}

}  // namespace kvlink::nixl
