// Any bytes: the functions of base/json_scan agree with each other, and what they take apart is
// whole again.
#include "base/assert.hpp"
#include "base/json_scan.hpp"

namespace base = semel::base;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    const auto members = base::top_level_members(text);
    const auto elements = base::array_elements(text);
    const auto canonical = base::canonical(text);
    SEMEL_ASSERT(!(members && elements), "a text is an object or an array");
    if (members) {
        std::string rebuilt = " {";
        for (auto member = members->rbegin(); member != members->rend(); ++member) {
            const auto name = base::unescape(member->name);
            SEMEL_ASSERT(name.has_value(), "the name of a valid member is a valid string");
            SEMEL_ASSERT(base::find_member(*members, *name).has_value(),
                         "each member is found by its name");
            if (rebuilt.size() > 2) rebuilt += " ,\n";
            rebuilt.append("\"").append(member->name).append("\" : ").append(member->value);
        }
        rebuilt += "}\t";
        const auto again = base::canonical(rebuilt);
        SEMEL_ASSERT(again.has_value() == canonical.has_value(),
                     "order does not decide whether there is a canonical form");
        if (canonical) {
            SEMEL_ASSERT(again->digest == canonical->digest, "order and white space do not matter");
            SEMEL_ASSERT(canonical->members.size() == members->size(),
                         "each member has its identity");
        }
    }
    if (elements && canonical)
        SEMEL_ASSERT(canonical->members.empty(), "only an object has members");
    std::string quoted;
    base::append_json_string(quoted, text);
    const auto back = base::json_string(quoted);
    SEMEL_ASSERT(back.has_value(), "what was quoted is a string");
    if (const auto plain = base::unescape(text)) {
        std::string once;
        base::append_json_string(once, *plain);
        SEMEL_ASSERT(base::json_string(once) == plain, "text survives quoting");
    }
    return 0;
}
