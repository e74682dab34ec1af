#include "base/fault_point.hpp"

#include <csignal>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

namespace semel::base {

std::atomic<bool> fault_points_armed{false};

namespace {
struct Point {
    int signal = 0;
    unsigned long passes_left = 1;
};
std::mutex points_mutex;
std::map<std::string, Point, std::less<>>& points() {
    static std::map<std::string, Point, std::less<>> all;
    return all;
}
}  // namespace

bool arm_fault_points(std::string_view specification, std::string& problem) {
    const std::lock_guard lock(points_mutex);
    while (!specification.empty()) {
        const auto comma = specification.find(',');
        const std::string_view one = specification.substr(0, comma);
        specification =
            comma == std::string_view::npos ? std::string_view{} : specification.substr(comma + 1);
        const auto equals = one.find('=');
        if (equals == std::string_view::npos) {
            problem = "fault point '" + std::string(one) +
                      "' has no action; write name=kill or name=stop";
            return false;
        }
        std::string_view action = one.substr(equals + 1);
        Point point;
        if (const auto colon = action.find(':'); colon != std::string_view::npos) {
            point.passes_left =
                std::strtoul(std::string(action.substr(colon + 1)).c_str(), nullptr, 10);
            action = action.substr(0, colon);
        }
        if (action == "kill") point.signal = SIGKILL;
        if (action == "stop") point.signal = SIGSTOP;
        if (point.signal == 0 || point.passes_left == 0) {
            problem = "fault point '" + std::string(one) +
                      "': the action must be kill or stop, the count at least 1";
            return false;
        }
        points()[std::string(one.substr(0, equals))] = point;
    }
    fault_points_armed = !points().empty();
    return true;
}

void pass_fault_point(std::string_view name) {
    int signal = 0;
    {
        const std::lock_guard lock(points_mutex);
        const auto found = points().find(name);
        if (found == points().end() || found->second.passes_left == 0) return;
        if (--found->second.passes_left == 0) signal = found->second.signal;
    }
    if (signal != 0) std::raise(signal);
}

}  // namespace semel::base
