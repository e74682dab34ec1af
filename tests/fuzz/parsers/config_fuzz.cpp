// Any bytes as a configuration: an answer or a message that begins with the file's name; never a
// crash, a hang or a secret.
#include "base/assert.hpp"
#include "config/config.hpp"

namespace config = semel::config;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    const auto result =
        config::parse(text, "file", [](const std::string& name) -> std::optional<std::string> {
            if (name.size() > 8) return std::nullopt;
            return "sk-hidden-" + name;
        });
    if (result) {
        SEMEL_ASSERT(result->routes.size() == 2, "both routes always have their dials");
        SEMEL_ASSERT(result->engine.retention_completed > result->engine.lease,
                     "a record outlives its call");
        SEMEL_ASSERT(result->admin.loopback(), "the admin address stays on the machine");
    } else {
        SEMEL_ASSERT(result.error().detail.starts_with("file:"), "a message says where");
    }
    for (const auto pattern : {text, text.substr(0, size / 2)})
        config::glob_matches(pattern, text.substr(size / 2));
    return 0;
}
