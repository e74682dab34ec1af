// What the tests of the configuration share.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "config/config.hpp"

namespace semel::config {

inline std::optional<std::string> environment(const std::string& name) {
    static const std::map<std::string, std::string> variables{
        {"WEB_TOKEN", "web-token"},      {"WEB_TOKEN_OLD", "web-token-old"},
        {"APP_TOKEN", "app-token"},      {"SAME_TOKEN", "web-token"},
        {"API_KEY", "sk-hidden"},        {"EMPTY", ""},
        {"LINE", "sk-hidden\n"},         {"PORT", "9999"},
        {"SECRET", "0123456789abcdef"},  {"SHORT", "short"},
        {"REDIS_PASSWORD", "pw-hidden"}, {"DB_PASSWORD", "pw-hidden"},
        {"POD_NAME", "orders-3"}};
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
}

inline base::Result<Config> read(std::string_view yaml) {
    return parse(yaml, "semel.yaml", environment);
}

/// Fails the test with the message where the text is refused.
inline Config accepted(std::string_view yaml) {
    auto result = read(yaml);
    if (!result) {
        ADD_FAILURE() << result.error().detail << "\n" << yaml;
        return {};
    }
    return *result;
}

/// In each file of `files` one map holds `stray_key`, so that its refusal lists all keys which that
/// map may have: each of them must stand on the reference page. The number of keys looked up.
inline constexpr std::string_view stray_key = "no_such_key_of_any_map: 1";
inline std::size_t keys_on_the_reference_page(const std::vector<std::string>& files) {
    std::ifstream file(SEMEL_CONFIG_PAGE);
    EXPECT_TRUE(file) << SEMEL_CONFIG_PAGE;
    const std::string page((std::istreambuf_iterator<char>(file)), {});
    std::size_t keys = 0;
    for (const std::string& yaml : files) {
        const auto result = read(yaml);
        const std::string message = result ? std::string("it is accepted") : result.error().detail;
        const std::string marker = "known here: ";
        const std::size_t at = message.find(marker);
        EXPECT_NE(at, std::string::npos) << message << "\n" << yaml;
        if (at == std::string::npos) continue;
        std::istringstream names(message.substr(at + marker.size()));
        for (std::string name; std::getline(names >> std::ws, name, ',');) {
            ++keys;
            bool named = false;
            for (const auto& [before, after] :
                 {std::pair("`", "`"), {".", "."}, {".", "`"}, {"`", "."}, {"`", ":"}}) {
                named = named || page.find(before + name + after) != std::string::npos;
            }
            EXPECT_TRUE(named) << name << " of " << yaml;
        }
    }
    return keys;
}

}  // namespace semel::config
