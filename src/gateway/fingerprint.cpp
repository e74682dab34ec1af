#include "gateway/fingerprint.hpp"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "base/json_scan.hpp"

namespace semel::gateway {
namespace {

// Version of what is covered and how. A change makes every earlier record a mismatch, so it is part
// of the digest.
constexpr std::string_view fingerprint_version = "semel-fingerprint-2";

/// Copied behind the envelope and digested in one go; longer ones are digested where they lie.
constexpr std::size_t short_body_max_bytes = 4096;

constexpr std::string_view meaningful_headers[] = {
    "openai-organization", "openai-project", "openai-beta", "anthropic-version", "anthropic-beta"};

constexpr std::size_t shortest_meaningful = std::string_view("openai-beta").size();

constexpr std::string_view known_members[] = {"model",
                                              "messages",
                                              "stream",
                                              "stream_options",
                                              "temperature",
                                              "top_p",
                                              "n",
                                              "stop",
                                              "max_tokens",
                                              "max_completion_tokens",
                                              "presence_penalty",
                                              "frequency_penalty",
                                              "logit_bias",
                                              "logprobs",
                                              "top_logprobs",
                                              "user",
                                              "tools",
                                              "tool_choice",
                                              "parallel_tool_calls",
                                              "response_format",
                                              "seed",
                                              "service_tier",
                                              "store",
                                              "metadata",
                                              "modalities",
                                              "audio",
                                              "prediction",
                                              "reasoning_effort",
                                              "functions",
                                              "function_call",
                                              "web_search_options",
                                              "verbosity",
                                              "prompt_cache_key",
                                              "safety_identifier",
                                              "input",
                                              "prompt",
                                              "content",
                                              "sessionId",
                                              "extra_body"};

std::uint64_t first_8(const base::Digest& digest) {
    std::uint64_t mark = 0;
    std::memcpy(&mark, digest.bytes.data(), sizeof mark);
    return mark;
}

/// Everything but the body, each part preceded by its length so that parts cannot run into each
/// other.
std::string envelope(const http::RequestHead& head) {
    std::string out;
    out.reserve(256);
    out += fingerprint_version;
    const auto add = [&out](std::string_view part) {
        char digits[20];
        out.append(digits, std::to_chars(digits, digits + sizeof digits, part.size()).ptr);
        out += ':';
        out += part;
    };
    add(head.method);
    add(head.path);
    add(head.query);
    // Most requests have none of them, so their names are compared only where one can be among
    // them.
    const bool any =
        std::any_of(head.headers.begin(), head.headers.end(), [](const http::Header& header) {
            return header.name.size() >= shortest_meaningful &&
                   (http::name_is(header.name.substr(0, 7), "openai-") ||
                    http::name_is(header.name.substr(0, 10), "anthropic-"));
        });
    if (any) {
        for (const std::string_view name : meaningful_headers) {
            for (const http::Header& header : head.headers) {
                if (!http::name_is(header.name, name)) continue;
                add(name);
                add(header.value);
            }
        }
    }
    out += ';';
    return out;
}

}  // namespace

Fingerprints::Fingerprints(const base::Hmac& secret) : secret_(secret) {
    for (const std::string_view name : known_members) {
        const std::uint64_t mark = name_mark(name);
        known_.emplace(mark, name);
        known_marks_.emplace(name, mark);
    }
}

std::uint64_t Fingerprints::name_mark(std::string_view name) const {
    if (const auto known = known_marks_.find(name); known != known_marks_.end())
        return known->second;
    std::string text = "field:";
    text += name;
    return first_8(secret_(text));
}

std::uint64_t Fingerprints::value_mark(std::string_view name, std::string_view identity) const {
    std::string text = "value:";
    text += std::to_string(name.size());
    text += ':';
    text += name;
    text += identity;
    return first_8(secret_(text));
}

base::Digest Fingerprints::keyed(std::string_view kind, const base::Digest& digest) const {
    std::string text(fingerprint_version);
    text += kind;
    text += digest.view();
    return secret_(text);
}

base::Digest Fingerprints::raw_of(const http::RequestHead& head, std::string_view body) const {
    std::string text = envelope(head);
    if (body.size() <= short_body_max_bytes) {
        text += body;
        return secret_(text);
    }
    base::Sha256 raw;
    return keyed("long", raw.update(text).update(body).finish());
}

void Fingerprints::complete(core::Fingerprint& print, const http::RequestHead& head,
                            std::string_view body) const {
    const auto canonical = base::canonical(body);
    if (!canonical) return;
    std::string text = "canonical";
    text += envelope(head);
    text += canonical->digest.view();
    print.canonical = secret_(text);
    print.fields.reserve(std::min(canonical->members.size(), core::fingerprint_fields_max));
    for (const auto& [name, identity] : canonical->members) {
        if (print.fields.size() == core::fingerprint_fields_max) break;
        print.fields.push_back({name_mark(name), value_mark(name, identity.view())});
    }
    std::sort(print.fields.begin(), print.fields.end(),
              [](const core::FieldMark& a, const core::FieldMark& b) { return a.name < b.name; });
}

core::Fingerprint Fingerprints::of_parts(
    const std::vector<std::pair<std::string_view, std::string_view>>& parts) const {
    core::Fingerprint print;
    base::Sha256 raw;
    raw.update(fingerprint_version).update("parts");
    for (const auto& [name, value] : parts) {
        raw.update(std::to_string(name.size())).update(":").update(name);
        raw.update(std::to_string(value.size())).update(":").update(value);
        print.fields.push_back({name_mark(name), value_mark(name, value)});
    }
    print.raw = keyed("parts", raw.finish());
    std::sort(print.fields.begin(), print.fields.end(),
              [](const core::FieldMark& a, const core::FieldMark& b) { return a.name < b.name; });
    return print;
}

std::vector<std::string> Fingerprints::names(const std::vector<std::uint64_t>& marks,
                                             std::string_view body_asked_now) const {
    std::unordered_map<std::uint64_t, std::string> asked;
    if (const auto members = base::top_level_members(body_asked_now)) {
        for (const base::JsonMember& member : *members)
            asked.emplace(name_mark(member.name), member.name);
    }
    std::vector<std::string> names;
    for (const std::uint64_t mark : marks) {
        if (const auto now = asked.find(mark); now != asked.end()) {
            names.push_back(now->second);
        } else if (const auto known = known_.find(mark); known != known_.end()) {
            names.push_back(known->second);
        } else {
            names.emplace_back("(another member)");
        }
    }
    std::sort(names.begin(), names.end());
    names.erase(std::unique(names.begin(), names.end()), names.end());
    return names;
}

}  // namespace semel::gateway
