#include "core/record.hpp"

namespace semel::core {

bool undecided(const Record& record) {
    switch (record.status) {
        case Status::processing:
        case Status::unknown:
            return true;
        case Status::failed:
            return !record.final && record.policy.kind == IntentKind::message;
        case Status::dead:
            return record.policy.kind == IntentKind::message && !record.letter_published;
        case Status::completed:
            return false;
    }
    return true;
}

}  // namespace semel::core
