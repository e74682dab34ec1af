// SEMEL_ASSERT: a broken invariant ends the process. A crash is a takeover; a wrong record stays.
#pragma once

namespace semel::base {

/// Prints the condition, the reason it must hold and where it stood, then aborts. Never returns.
[[noreturn]] void assertion_failed(const char* condition, const char* why, const char* file,
                                   int line) noexcept;

}  // namespace semel::base

#define SEMEL_ASSERT(condition, why) \
    (static_cast<bool>(condition)    \
         ? static_cast<void>(0)      \
         : ::semel::base::assertion_failed(#condition, (why), __FILE__, __LINE__))
