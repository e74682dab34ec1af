#include "consumer/verdict.hpp"

#include "base/assert.hpp"

namespace semel::consumer {

const char* name_of(DeadClass which) {
    switch (which) {
        case DeadClass::attempts:
            return "attempts";
        case DeadClass::crashes:
            return "crashes";
        case DeadClass::fatal:
            return "fatal";
        case DeadClass::mismatch:
            return "mismatch";
        case DeadClass::conflict:
            return "conflict";
        case DeadClass::unknown:
            return "unknown";
        case DeadClass::decode:
            return "decode";
        case DeadClass::missing_id:
            return "missing_id";
        case DeadClass::tombstone:
            return "tombstone";
    }
    SEMEL_ASSERT(false, "every class of dead letters has a name");
}

}  // namespace semel::consumer
