// SPDX-License-Identifier: Apache-2.0
#include "transports/cma_permission.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>
#include <string>

#include "base/read_file.h"

namespace kvlink {
namespace {

constexpr int kCapSysPtrace = 19;

std::optional<std::string> own_status(const std::string& field) {
  const std::string status = read_file("/proc/self/status").value_or("");
  for (std::string_view rest = status; !rest.empty();) {
    const std::string_view line = take_line(rest);
    if (line.starts_with(field + ":\t")) return std::string(line.substr(field.size() + 2));
  }
  return {};
}

bool may_ptrace_anyone() {
  const auto effective = own_status("CapEff");
  return effective && (std::stoull(*effective, nullptr, 16) >> kCapSysPtrace & 1) != 0;
}

int yama_scope() {
  // 0 also where the kernel has no Yama
  return std::atoi(read_file("/proc/sys/kernel/yama/ptrace_scope").value_or("0").c_str());
}

bool is_dumpable(pid_t process, uid_t uid) {
  // The files of a process that is not dumpable belong to root, though its folder does not.
  struct stat found{};
  return ::stat(("/proc/" + std::to_string(process) + "/status").c_str(), &found) != 0 || found.st_uid == uid;
}

}  // namespace

Status why_cma_refused(pid_t owner, uid_t owner_uid) {
  const std::string whose = "reading the memory of process " + std::to_string(owner) + " is refused: ";
  const std::string capability = "give the reader CAP_SYS_PTRACE (docker run --cap-add SYS_PTRACE)";
  const int scope = yama_scope();
  if (scope >= 3) {
    return Status::Unavailable(whose + "kernel.yama.ptrace_scope is 3",
                               "reboot with a lower value, or use shm or tcp");
  }
  if (may_ptrace_anyone()) {
    return Status::Unavailable(
        whose + "a security module (AppArmor, SELinux) or the owner's user namespace forbids it",
        "run both ends in one user namespace and under one profile, or use shm or tcp");
  }
  if (owner_uid != ::geteuid()) {
    return Status::Unavailable(whose + "it runs as uid " + std::to_string(owner_uid) +
                                   ", this process as uid " + std::to_string(::geteuid()),
                               "run both ends as one user, or " + capability);
  }
  if (scope >= 1) {
    return Status::Unavailable(whose + "kernel.yama.ptrace_scope is " + std::to_string(scope),
                               "sysctl kernel.yama.ptrace_scope=0, or " + capability);
  }
  if (!is_dumpable(owner, owner_uid)) {
    return Status::Unavailable(whose + "it is not dumpable (set-uid, or prctl(PR_SET_DUMPABLE, 0))",
                               "start the owner without raised privileges, or " + capability);
  }
  return Status::Unavailable(
      whose + "its capabilities exceed this process's, or a security module forbids it",
      "run both ends alike, or " + capability);
}

}  // namespace kvlink
