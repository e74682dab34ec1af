#include "core/fingerprint.hpp"

#include <algorithm>

namespace semel::core {

std::vector<std::uint64_t> differing_fields(const Fingerprint& a, const Fingerprint& b) {
    std::vector<std::uint64_t> names;
    auto x = a.fields.begin();
    auto y = b.fields.begin();
    while (x != a.fields.end() || y != b.fields.end()) {
        if (y == b.fields.end() || (x != a.fields.end() && x->name < y->name)) {
            names.push_back((x++)->name);
        } else if (x == a.fields.end() || y->name < x->name) {
            names.push_back((y++)->name);
        } else {
            if (x->value != y->value) names.push_back(x->name);
            ++x;
            ++y;
        }
    }
    names.erase(std::unique(names.begin(), names.end()), names.end());
    return names;
}

}  // namespace semel::core
