// What every measuring program does when it cannot go on.
#pragma once

#include <errno.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace bench {

/// Says why on stderr, under the program's name, and ends it with 1.
[[noreturn]] inline void fail(const std::string& why) {
    std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, why.c_str());
    std::exit(1);
}

}  // namespace bench
