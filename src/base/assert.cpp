#include "base/assert.hpp"

#include <cstdio>
#include <cstdlib>

namespace semel::base {

void assertion_failed(const char* condition, const char* why, const char* file, int line) noexcept {
    std::fprintf(stderr, "semel: broken invariant: %s (%s) at %s:%d\n", condition, why, file, line);
    std::fflush(stderr);
    std::abort();
}

}  // namespace semel::base
