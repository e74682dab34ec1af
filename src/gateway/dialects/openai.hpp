// OpenAI chat completions: what a request asks for, what an answer's events mean, and the usage
// block.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "core/record.hpp"

namespace semel::gateway::openai {

/// What the body of a chat completion request says, as far as the gateway needs it. Lenient: a body
/// that is not a JSON object has no facts, and the upstream may judge it.
struct RequestFacts {
    bool is_object = false;
    std::string model;  ///< Empty: none, or not a string.
    bool stream = false;
    bool usage_wanted = false;  ///< stream_options.include_usage is true.
};
RequestFacts read_request(std::string_view body);

/// The body with stream_options.include_usage set to true, everything else byte for byte. Nullopt:
/// nothing to change (it is set, or the body is of a shape that only the upstream can judge).
std::optional<std::string> with_usage_asked(std::string_view body);

/// Takes the model and usage of a plain answer into `usage`; false if it states no tokens.
bool read_usage(std::string_view json, core::Usage& usage);

/// Whether a 2xx answer with a JSON content type is complete as far as one can see: valid JSON, an object without an `error`.
/// Takes its model and usage into `usage` in the same pass.
bool read_answer(std::string_view body, core::Usage& usage);

/// The meaning of one server-sent event.
struct EventMeaning {
    bool terminal = false;    ///< `[DONE]`.
    bool error = false;       ///< An error in the middle of a 200 stream.
    bool usage_only = false;  ///< The extra chunk of include_usage: no choices, a usage block.
    std::string_view data;    ///< As given.
};
/// Reads `data` of an event named `event` (may be empty); takes its usage, if it has one, into
/// `usage`.
EventMeaning read_event(std::string_view event, std::string_view data, core::Usage& usage);

/// choices[0].message.content of a plain answer; nullopt: it has none (null content counts as empty
/// text).
std::optional<std::string> answer_text(std::string_view body);
/// choices[0].delta.content of a chunk; empty if it has none.
std::string delta_text(std::string_view data);

}  // namespace semel::gateway::openai
