// A pointer, a line end, and a JSON text, all of any bytes: what is found lies in the text and is
// JSON itself.
#include <functional>
#include <string>

#include "base/assert.hpp"
#include "consumer/identity.hpp"

using namespace semel;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    const std::size_t line = std::min(text.find('\n'), text.size());
    const std::string_view pointer = text.substr(0, line);
    const std::string_view json = text.substr(std::min(line + 1, text.size()));
    const auto whole = consumer::at_pointer(json, "");
    const auto found = consumer::at_pointer(json, pointer);
    if (!found) return 0;
    SEMEL_ASSERT(whole.has_value(), "what is broken is not searched");
    SEMEL_ASSERT(consumer::is_pointer(pointer), "only pointers find something");
    SEMEL_ASSERT(
        std::less_equal<>()(json.data(), found->data()) && found->size() <= json.size() &&
            static_cast<std::size_t>(found->data() - json.data()) <= json.size() - found->size(),
        "what is found lies in the text");
    SEMEL_ASSERT(consumer::at_pointer(*found, "") == found, "a value is a text of its own");
    // Each pointer is a way: its last step starts from what the steps before have found.
    if (const std::size_t last = pointer.rfind('/'); last != std::string_view::npos) {
        const auto parent = consumer::at_pointer(json, pointer.substr(0, last));
        SEMEL_ASSERT(parent && consumer::at_pointer(*parent, pointer.substr(last)) == found,
                     "steps can be taken one by one");
    }
    return 0;
}
