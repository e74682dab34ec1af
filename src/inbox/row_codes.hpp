// The numbers of message_dedup's column `status`.
#pragma once

#include <cstdint>

#include "base/assert.hpp"
#include "core/record.hpp"

namespace semel::inbox {

inline constexpr std::int64_t code_processing = 0;
inline constexpr std::int64_t code_done = 1;
inline constexpr std::int64_t code_failed = 2;
inline constexpr std::int64_t code_dead = 3;
inline constexpr std::int64_t code_unknown = 4;

constexpr std::int64_t code_of(core::Status status) {
    switch (status) {
        case core::Status::processing:
            return code_processing;
        case core::Status::completed:
            return code_done;
        case core::Status::failed:
            return code_failed;
        case core::Status::dead:
            return code_dead;
        case core::Status::unknown:
            return code_unknown;
    }
    SEMEL_ASSERT(false, "a status is one of five");
}

/// A number that is none of them, written by somebody else, is an outcome nobody knows.
constexpr core::Status status_of(std::int64_t code) {
    switch (code) {
        case code_processing:
            return core::Status::processing;
        case code_done:
            return core::Status::completed;
        case code_failed:
            return core::Status::failed;
        case code_dead:
            return core::Status::dead;
        default:
            return core::Status::unknown;
    }
}

}  // namespace semel::inbox
