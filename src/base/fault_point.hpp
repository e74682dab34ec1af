// Named points at which a test can have the process killed or paused:
// SEMEL_FAULT_POINTS="complete.before=kill,call.before=kill:2".
#pragma once

#include <atomic>
#include <string>
#include <string_view>

namespace semel::base {

/// True if the environment named any fault point at the start. False in production: then a point
/// costs one load.
extern std::atomic<bool> fault_points_armed;

/// Reads SEMEL_FAULT_POINTS ("name=kill[:n]" kills the process with SIGKILL at the n-th pass,
/// default the first; "name=stop[:n]" sends SIGSTOP). False and a reason in `problem` if it cannot
/// be read. Call once, before threads.
bool arm_fault_points(std::string_view specification, std::string& problem);

/// A pass of the point `name`.
void pass_fault_point(std::string_view name);

inline void fault_point(std::string_view name) {
    if (fault_points_armed.load(std::memory_order_relaxed)) pass_fault_point(name);
}

}  // namespace semel::base
