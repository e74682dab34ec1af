#include "mock/script.hpp"

#include "base/json_scan.hpp"

namespace semel::mock {

namespace {

bool is_header_text(std::string_view text) {
    return text.find_first_of(std::string_view("\r\n\0", 3)) == std::string_view::npos;
}

}  // namespace

std::optional<std::string> base64_decode(std::string_view text) {
    static constexpr std::string_view alphabet =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    if (text.size() % 4 != 0) return std::nullopt;
    std::size_t padding = 0;
    while (padding < 2 && !text.empty() && text.back() == '=') {
        text.remove_suffix(1);
        ++padding;
    }
    std::string out;
    out.reserve(text.size() * 3 / 4);
    std::uint32_t buffer = 0;
    int bits = 0;
    for (const char c : text) {
        const std::size_t value = alphabet.find(c);
        if (value == std::string_view::npos) return std::nullopt;
        buffer = (buffer << 6) | static_cast<std::uint32_t>(value);
        bits += 6;
        if (bits < 8) continue;
        bits -= 8;
        out += static_cast<char>(buffer >> bits & 0xFF);
    }
    return out;
}

std::optional<Script> parse_script(std::string_view json) {
    const auto members = base::top_level_members(json);
    if (!members) return std::nullopt;
    Script script;
    const auto model = base::find_member(*members, "model");
    const auto chunks = base::find_member(*members, "chunks");
    if (!model || !chunks) return std::nullopt;
    auto name = base::json_string(*model);
    const auto elements = base::array_elements(*chunks);
    if (!name || !elements) return std::nullopt;
    script.model = std::move(*name);
    for (const std::string_view element : *elements) {
        const auto text = base::json_string(element);
        if (!text) return std::nullopt;
        auto bytes = base64_decode(*text);
        if (!bytes) return std::nullopt;
        script.chunks.push_back(std::move(*bytes));
    }
    if (const auto raw = base::find_member(*members, "gap_ms")) {
        const auto gap = base::json_integer(*raw);
        if (!gap || *gap < 0) return std::nullopt;
        script.gap = std::chrono::milliseconds(*gap);
    }
    if (const auto raw = base::find_member(*members, "status")) {
        const auto status = base::json_integer(*raw);
        if (!status || *status < 200 || *status > 599) return std::nullopt;
        script.status = static_cast<int>(*status);
    }
    if (const auto raw = base::find_member(*members, "content_type")) {
        auto type = base::json_string(*raw);
        if (!type || !is_header_text(*type)) return std::nullopt;
        script.content_type = std::move(*type);
    }
    if (const auto raw = base::find_member(*members, "headers")) {
        const auto headers = base::top_level_members(*raw);
        if (!headers) return std::nullopt;
        for (const base::JsonMember& header : *headers) {
            const auto header_name = base::unescape(header.name);
            const auto value = base::json_string(header.value);
            if (!header_name || !value || !is_header_text(*header_name) || !is_header_text(*value))
                return std::nullopt;
            script.headers += *header_name + ": " + *value + "\r\n";
        }
    }
    if (const auto raw = base::find_member(*members, "end")) {
        const auto end = base::json_string(*raw);
        if (end == "finish") {
            script.end = Script::End::finish;
        } else if (end == "cut") {
            script.end = Script::End::cut;
        } else if (end == "stall") {
            script.end = Script::End::stall;
        } else {
            return std::nullopt;
        }
    }
    return script;
}

void Scripts::put(Script script) {
    auto shared = std::make_shared<const Script>(std::move(script));
    const std::lock_guard lock(mutex_);
    scripts_[shared->model] = shared;
}

std::shared_ptr<const Script> Scripts::find(std::string_view model) const {
    const std::lock_guard lock(mutex_);
    const auto found = scripts_.find(model);
    return found == scripts_.end() ? nullptr : found->second;
}

void Scripts::reset() {
    const std::lock_guard lock(mutex_);
    scripts_.clear();
}

}  // namespace semel::mock
