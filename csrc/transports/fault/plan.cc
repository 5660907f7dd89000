// SPDX-License-Identifier: Apache-2.0
#include "transports/fault/plan.h"

#include <array>
#include <charconv>
#include <optional>
#include <string>
#include <utility>

namespace kvlink {
namespace {

constexpr std::array<std::pair<std::string_view, FaultAction>, 7> kActions{{
    {"delay", FaultAction::kDelay},
    {"drop", FaultAction::kDrop},
    {"hang", FaultAction::kHang},
    {"fail", FaultAction::kFail},
    {"deny", FaultAction::kDeny},
    {"corrupt", FaultAction::kCorrupt},
    {"break", FaultAction::kBreak},
}};
constexpr std::array<std::pair<std::string_view, FaultTarget>, 3> kTargets{{
    {"", FaultTarget::kAny},
    {"slot", FaultTarget::kSlot},
    {"data", FaultTarget::kData},
}};
constexpr std::array<std::pair<std::string_view, int64_t>, 3> kUnitsNs{{
    {"us", 1'000},
    {"ms", 1'000'000},
    {"s", 1'000'000'000},
}};
constexpr uint64_t kMaxNumber = 1'000'000'000;

template <typename Table>
auto find(const Table& table, std::string_view name) -> std::optional<decltype(table[0].second)> {
  for (const auto& [key, value] : table) {
    if (key == name) return value;
  }
  return {};
}

// Returns the text before and after the first `mark`, or all of it and nothing.
std::pair<std::string_view, std::string_view> split(std::string_view text, std::string_view mark) {
  const size_t at = text.find(mark);
  if (at == text.npos) return {text, {}};
  return {text.substr(0, at), text.substr(at + mark.size())};
}

// Takes a number from 1 to kMaxNumber from the start of `text`.
std::optional<uint64_t> take_number(std::string_view& text) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || number == 0 || number > kMaxNumber) return {};
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return number;
}

bool parse_when(std::string_view text, FaultRule& rule) {
  const bool every = text.starts_with("every:");
  if (every) text.remove_prefix(6);
  const auto number = take_number(text);
  if (!number) return false;
  if (every) rule.every = *number;
  rule.first = rule.last = *number;
  if (!every && text.starts_with("..")) {
    text.remove_prefix(2);
    const auto last = take_number(text);
    if (!last || *last < *number) return false;
    rule.last = *last;
  }
  return text.empty();
}

std::optional<int64_t> parse_time(std::string_view text) {
  const auto number = take_number(text);
  const auto unit_ns = find(kUnitsNs, text);
  if (!number || !unit_ns || static_cast<int64_t>(*number) > INT64_MAX / *unit_ns) return {};
  return static_cast<int64_t>(*number) * *unit_ns;
}

std::optional<FaultRule> parse_rule(std::string_view text) {
  const auto [what, when] = split(text, "@");
  const auto [name, time] = split(what, "=");
  const auto [verb, object] = split(name, "-");
  const auto action = find(kActions, verb);
  const auto target = find(kTargets, object);
  FaultRule rule;
  if (!action || !target || name.ends_with('-') || !parse_when(when, rule)) return {};
  rule.action = *action;
  rule.target = *target;
  if (rule.action != FaultAction::kDelay) return name == what ? std::optional(rule) : std::nullopt;
  const auto delay_ns = parse_time(time);
  if (!delay_ns) return {};
  rule.delay_ns = *delay_ns;
  return rule;
}

}  // namespace

Result<std::vector<FaultRule>> parse_fault_plan(std::string_view plan) {
  std::vector<FaultRule> rules;
  while (!plan.empty()) {
    const auto [text, rest] = split(plan, ";");
    const auto rule = parse_rule(text);
    if (!rule) {
      return Status{
          Code::kConfig, "not a fault rule: \"" + std::string(text) + "\"",
          "write action[-slot|-data][=time]@when, several joined by \";\": action is delay (with a time such "
          "as 5ms), drop, hang, fail, deny, corrupt or break; when is N, A..B or every:K"};
    }
    rules.push_back(*rule);
    plan = rest;
  }
  return rules;
}

}  // namespace kvlink
