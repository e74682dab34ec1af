#include "gateway/request_id.hpp"

#include <algorithm>

#include "core/key.hpp"

namespace semel::gateway {
namespace {

bool visible(char c) { return c > 0x20 && c < 0x7f; }

RequestId parse(std::string_view value) {
    if (value.empty()) return MalformedId{"it is empty"};
    std::string id;
    if (value.front() == '"') {
        if (value.size() < 2 || value.back() != '"')
            return MalformedId{"its quotes are not closed"};
        value = value.substr(1, value.size() - 2);
        for (std::size_t i = 0; i < value.size(); ++i) {
            if (value[i] == '"') return MalformedId{"it has a quote inside its quotes"};
            if (value[i] == '\\') {
                if (i + 1 == value.size() || (value[i + 1] != '"' && value[i + 1] != '\\')) {
                    return MalformedId{
                        "it has a backslash that escapes neither a quote nor a backslash"};
                }
                ++i;
            }
            id += value[i];
        }
    } else {
        // A comma is how intermediaries merge two lines into one: which of the two would it be?
        if (value.find_first_of("\",") != std::string_view::npos) {
            return MalformedId{
                "a bare value may have no comma or quote; send one value, or a quoted string"};
        }
        id = value;
    }
    if (id.empty()) return MalformedId{"it is empty"};
    if (id.size() > core::key_part_max_bytes)
        return MalformedId{"it is longer than 255 characters"};
    if (!std::all_of(id.begin(), id.end(), visible)) {
        return MalformedId{"it has characters other than visible ASCII"};
    }
    return id;
}

}  // namespace

RequestId read_request_id(const http::RequestHead& head, bool alias) {
    for (const std::string_view name :
         {std::string_view("idempotency-key"), std::string_view("x-request-id")}) {
        if (name == "x-request-id" && !alias) break;
        RequestId found;
        for (const http::Header& header : head.headers) {
            if (!http::name_is(header.name, name)) continue;
            RequestId one = parse(header.value);
            if (std::holds_alternative<MalformedId>(one)) return one;
            if (std::holds_alternative<NoId>(found)) {
                found = std::move(one);
            } else if (std::get<std::string>(found) != std::get<std::string>(one)) {
                return MalformedId{"it was sent twice with different values"};
            }
        }
        if (!std::holds_alternative<NoId>(found)) return found;
    }
    return NoId{};
}

}  // namespace semel::gateway
