// JSON as it lies in memory: checks, top-level members and an order-free digest in one pass,
// without building a tree.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/hash.hpp"

namespace semel::base {

/// Objects and arrays within each other, the outermost included. Deeper text counts as invalid.
inline constexpr std::size_t json_depth_max = 64;
/// Members of all objects that are open at one place of the text. Text with more counts as invalid:
/// it bounds memory.
inline constexpr std::size_t json_members_max = 64 * 1024;

// All functions are strict RFC 8259: valid UTF-8, no byte order mark, no trailing bytes, no lone
// surrogate escapes. Views in results point into the argument. Pure functions: any thread.

struct JsonMember {
    std::string_view name;  ///< Between the quotes, as spelled: escapes are not resolved.
    std::string_view
        value;  ///< As spelled, without white space around it; a string with its quotes.
};

/// The members of the outermost object in their order, duplicates included. Nullopt: not one valid
/// object.
std::optional<std::vector<JsonMember>> top_level_members(std::string_view json);
/// The elements of the outermost array. Nullopt: not one valid array.
std::optional<std::vector<std::string_view>> array_elements(std::string_view json);
/// The value of the member of that (decoded) name; the last one where the name is repeated, as most
/// parsers take it.
std::optional<std::string_view> find_member(const std::vector<JsonMember>& members,
                                            std::string_view name);

struct CanonicalJson {
    Digest digest;  ///< Equal for two texts exactly if they differ in nothing but white space and
                    ///< the order of members.
    /// Of an outermost object: names as spelled, sorted, and an identity of each value (not a plain
    /// SHA-256: short values stand for themselves, so never store or show it without a keyed hash).
    /// Else empty.
    std::vector<std::pair<std::string_view, Digest>> members;
};
/// Strings, numbers and names count as they are spelled (1.0 is not 1, "\u0061" is not "a").
/// Nullopt: invalid text, or an object at any depth that has two members of one (decoded) name:
/// what it means depends on who reads it.
std::optional<CanonicalJson> canonical(std::string_view json);

/// The text of a string, given what stands between its quotes. Nullopt: that is no valid string.
std::optional<std::string> unescape(std::string_view raw_string_contents);
/// A raw value as what it is; nullopt: it is something else (an integer with fraction, exponent or
/// overflow, too).
std::optional<std::string> json_string(std::string_view raw_value);
std::optional<bool> json_bool(std::string_view raw_value);
std::optional<std::int64_t> json_integer(std::string_view raw_value);
bool json_is_null(std::string_view raw_value);

/// Appends `text` as a JSON string with quotes. Bytes that are not valid UTF-8 become U+FFFD, so
/// that the result is always valid.
void append_json_string(std::string& out, std::string_view text);

}  // namespace semel::base
