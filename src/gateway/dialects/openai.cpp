#include "gateway/dialects/openai.hpp"

#include "base/json_scan.hpp"
#include "http/message.hpp"

namespace semel::gateway::openai {
namespace {

using base::find_member;
using base::json_bool;
using base::json_integer;
using base::json_is_null;
using base::json_string;
using base::top_level_members;

void read_integer(const std::vector<base::JsonMember>& members, std::string_view name,
                  std::int64_t& into) {
    if (const auto raw = find_member(members, name)) {
        if (const auto number = json_integer(*raw); number && *number >= 0) into = *number;
    }
}

void read_detail(const std::vector<base::JsonMember>& members, std::string_view object,
                 std::string_view name, std::int64_t& into) {
    if (const auto raw = find_member(members, object)) {
        if (const auto details = top_level_members(*raw)) read_integer(*details, name, into);
    }
}

bool take_usage(const std::vector<base::JsonMember>& members, core::Usage& usage) {
    const auto raw = find_member(members, "usage");
    if (!raw) return false;
    const auto block = top_level_members(*raw);
    if (!block) return false;
    read_integer(*block, "prompt_tokens", usage.input_tokens);
    read_integer(*block, "completion_tokens", usage.output_tokens);
    read_detail(*block, "prompt_tokens_details", "cached_tokens", usage.cached_tokens);
    read_detail(*block, "completion_tokens_details", "reasoning_tokens", usage.reasoning_tokens);
    return usage.input_tokens >= 0 || usage.output_tokens >= 0;
}

void take_model(const std::vector<base::JsonMember>& members, core::Usage& usage) {
    if (const auto raw = find_member(members, "model")) {
        if (auto model = json_string(*raw)) usage.model = std::move(*model);
    }
}

/// The first element of `choices`, as members.
std::optional<std::vector<base::JsonMember>> first_choice(std::string_view json) {
    const auto members = top_level_members(json);
    if (!members) return std::nullopt;
    const auto choices = find_member(*members, "choices");
    if (!choices) return std::nullopt;
    const auto elements = base::array_elements(*choices);
    if (!elements || elements->empty()) return std::nullopt;
    return top_level_members(elements->front());
}

}  // namespace

RequestFacts read_request(std::string_view body) {
    RequestFacts facts;
    const auto members = top_level_members(body);
    if (!members) return facts;
    facts.is_object = true;
    if (const auto raw = find_member(*members, "model")) {
        if (auto model = json_string(*raw)) facts.model = std::move(*model);
    }
    if (const auto raw = find_member(*members, "stream"))
        facts.stream = json_bool(*raw).value_or(false);
    if (const auto raw = find_member(*members, "stream_options")) {
        if (const auto options = top_level_members(*raw)) {
            if (const auto include = find_member(*options, "include_usage")) {
                facts.usage_wanted = json_bool(*include).value_or(false);
            }
        }
    }
    return facts;
}

std::optional<std::string> with_usage_asked(std::string_view body) {
    const auto members = top_level_members(body);
    if (!members || members->empty()) return std::nullopt;
    const auto replaced = [body](std::string_view what, std::string_view with) {
        const auto at = static_cast<std::size_t>(what.data() - body.data());
        std::string out;
        out.reserve(body.size() + with.size());
        out.append(body.substr(0, at)).append(with).append(body.substr(at + what.size()));
        return out;
    };
    const auto options = find_member(*members, "stream_options");
    if (!options) {
        const std::size_t brace = body.find('{');
        return replaced(body.substr(brace, 1), R"({"stream_options":{"include_usage":true},)");
    }
    if (json_is_null(*options)) return replaced(*options, R"({"include_usage":true})");
    const auto inner = top_level_members(*options);
    if (!inner) return std::nullopt;
    if (const auto include = find_member(*inner, "include_usage")) {
        if (json_bool(*include).value_or(false)) return std::nullopt;
        return replaced(*include, "true");
    }
    return replaced(options->substr(0, 1),
                    inner->empty() ? R"({"include_usage":true)" : R"({"include_usage":true,)");
}

bool read_usage(std::string_view json, core::Usage& usage) {
    const auto members = top_level_members(json);
    if (!members) return false;
    take_model(*members, usage);
    return take_usage(*members, usage);
}

bool read_answer(std::string_view body, core::Usage& usage) {
    const auto members = top_level_members(body);
    if (!members) return false;
    take_model(*members, usage);
    take_usage(*members, usage);
    const auto error = find_member(*members, "error");
    return !error || json_is_null(*error);
}

EventMeaning read_event(std::string_view event, std::string_view data, core::Usage& usage) {
    EventMeaning meaning{.data = data};
    if (data == "[DONE]") {
        meaning.terminal = true;
        return meaning;
    }
    meaning.error = event == "error";
    // Most events are plain deltas: only those that can matter are parsed.
    const bool may_matter = data.find("\"error\"") != std::string_view::npos ||
                            data.find("\"usage\"") != std::string_view::npos ||
                            usage.model.empty() || data.find('\\') != std::string_view::npos;
    if (!may_matter) return meaning;
    const auto members = top_level_members(data);
    if (!members) return meaning;
    if (const auto error = find_member(*members, "error"); error && !json_is_null(*error))
        meaning.error = true;
    take_model(*members, usage);
    if (take_usage(*members, usage)) {
        if (const auto choices = find_member(*members, "choices")) {
            const auto elements = base::array_elements(*choices);
            meaning.usage_only = elements && elements->empty();
        }
    }
    return meaning;
}

std::optional<std::string> answer_text(std::string_view body) {
    const auto choice = first_choice(body);
    if (!choice) return std::nullopt;
    const auto message = find_member(*choice, "message");
    if (!message) return std::nullopt;
    const auto members = top_level_members(*message);
    if (!members) return std::nullopt;
    const auto content = find_member(*members, "content");
    if (!content || json_is_null(*content)) return std::string{};
    return json_string(*content);
}

std::string delta_text(std::string_view data) {
    const auto choice = first_choice(data);
    if (!choice) return {};
    const auto delta = find_member(*choice, "delta");
    if (!delta) return {};
    const auto members = top_level_members(*delta);
    if (!members) return {};
    const auto content = find_member(*members, "content");
    if (!content) return {};
    return json_string(*content).value_or(std::string{});
}

}  // namespace semel::gateway::openai
