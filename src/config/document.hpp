// A configuration file as it is read: maps that know their keys, values with units, and a line
// number in every refusal.
#pragma once

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <set>
#include <utility>

#include "config/config.hpp"

namespace semel::config {

/// Names enter keys and metrics; a key part holds 255 bytes.
inline constexpr std::size_t name_max_bytes = 255;
inline constexpr milliseconds duration_max{std::chrono::hours{24 * 3650}};
inline constexpr std::uint64_t size_max = 1ull << 40;

/// What ends the reading. It never leaves this module: parse() turns it into an Error.
struct Refused {
    std::string message;
};

/// In quotes, cut where it is long, without control characters.
std::string quoted(std::string_view text);

template <class Range>
std::string joined(const Range& words) {
    std::string out;
    for (const auto& word : words) out.append(out.empty() ? "" : ", ").append(word);
    return out;
}

/// "; did you mean 'x'?", or all that is known where nothing is close.
std::string advice(std::string_view word, const std::vector<std::string_view>& known);

/// What a later version reads: refused with a sentence of its own, not as a spelling mistake.
using Later = std::initializer_list<std::string_view>;

class Document {
  public:
    Document(const std::string& file, const Environment& environment)
        : file_(file), environment_(environment) {}

    [[noreturn]] void refuse(int line, const std::string& message) const {
        throw Refused{file_ + ":" + std::to_string(line) + ": " + message};
    }
    [[noreturn]] void refuse(const YAML::Node& at, const std::string& message) const {
        refuse(at.Mark().line + 1, message);
    }

    /// The text of a scalar, with ${NAME} replaced by the environment.
    std::string text(const YAML::Node& node, const std::string& path) const {
        if (!node.IsScalar()) {
            refuse(node,
                   path + " must be " +
                       (node.IsNull() ? "given a value" : "a single value, not a list or map"));
        }
        return substituted(node, node.Scalar(), path);
    }

    /// The value of the variable that the key at `path` names. Its value enters no message.
    std::string variable(const YAML::Node& node, const std::string& path) const {
        const std::string name = text(node, path);
        if (!is_variable_name(name))
            refuse(node, path + " must be the name of an environment variable, not a value");
        const auto value = environment_(name);
        if (!value)
            refuse(node, path + ": environment variable " + name +
                             " is not set: export it or remove the key");
        if (value->empty())
            refuse(node,
                   path + ": environment variable " + name + " is empty: set it or remove the key");
        for (const char c : *value) {
            if (static_cast<unsigned char>(c) <= 0x20 || static_cast<unsigned char>(c) == 0x7F) {
                refuse(node,
                       path + ": environment variable " + name +
                           " holds a blank, a line end or a control character: set it without");
            }
        }
        return *value;
    }

  private:
    static bool is_variable_name(std::string_view name) {
        const auto letter = [](char c) {
            return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
        };
        if (name.empty() || name.size() > name_max_bytes || !letter(name.front())) return false;
        return std::all_of(name.begin(), name.end(),
                           [&](char c) { return letter(c) || (c >= '0' && c <= '9'); });
    }

    std::string substituted(const YAML::Node& node, const std::string& raw,
                            const std::string& path) const {
        std::string out;
        std::size_t at = 0;
        while (true) {
            const std::size_t open = raw.find("${", at);
            out.append(raw, at, open - at);
            if (open == std::string::npos) return out;
            const std::size_t close = raw.find('}', open);
            const std::string name =
                close == std::string::npos ? "" : raw.substr(open + 2, close - open - 2);
            if (!is_variable_name(name))
                refuse(node, path + ": '${' begins no ${NAME} of an environment variable");
            const auto value = environment_(name);
            if (!value)
                refuse(node, path + ": environment variable " + name + " is not set: export it");
            out += *value;
            at = close + 1;
        }
    }

    const std::string& file_;
    const Environment& environment_;
};

/// One map of the file: knows which keys it may have, and has them read at most once each.
class Map {
  public:
    Map(const Document& document, const YAML::Node& node, std::string path,
        std::vector<std::string_view> known, Later later = {})
        : document_(document), node_(node), path_(std::move(path)) {
        if (node.IsNull()) return;
        if (!node.IsMap())
            document.refuse(node, where() + " must be a map of keys" +
                                      (known.empty() ? "" : ": " + joined(known)));
        std::set<std::string> seen;
        for (const auto& entry : node) {
            const YAML::Node& key = entry.first;
            if (!key.IsScalar())
                document.refuse(key, "a key in " + where() + " is not a plain name");
            const std::string& name = key.Scalar();
            if (!seen.insert(name).second)
                document.refuse(key, "key " + quoted(name) + in() + " is given twice; remove one");
            if (std::find(later.begin(), later.end(), name) != later.end()) {
                document.refuse(
                    key, quoted(name) + in() + " is not supported by this version; remove it");
            }
            if (std::find(known.begin(), known.end(), name) == known.end()) {
                document.refuse(key, "unknown key " + quoted(name) + in() + advice(name, known));
            }
            entries_.emplace_back(name, entry.second);
        }
    }

    [[nodiscard]] const YAML::Node* find(std::string_view key) const {
        for (const auto& [name, value] : entries_) {
            if (name == key) return &value;
        }
        return nullptr;
    }
    [[nodiscard]] std::string path(std::string_view key) const {
        return path_.empty() ? std::string(key) : path_ + "." + std::string(key);
    }
    [[nodiscard]] const std::vector<std::pair<std::string, YAML::Node>>& entries() const {
        return entries_;
    }
    /// Of the map itself; empty: the whole file.
    [[nodiscard]] const std::string& own_path() const { return path_; }
    [[nodiscard]] const YAML::Node& node() const { return node_; }
    [[nodiscard]] const Document& document() const { return document_; }
    [[noreturn]] void refuse(std::string_view key, const std::string& message) const {
        const YAML::Node* at = find(key);
        document_.refuse(at != nullptr ? *at : node_, path(key) + message);
    }

    // Each reads `key` into `into` if it is there.
    void read(std::string_view key, std::string& into) const {
        if (const YAML::Node* at = find(key)) into = document_.text(*at, path(key));
    }
    void read(std::string_view key, bool& into) const {
        if (const YAML::Node* at = find(key)) {
            const std::string text = document_.text(*at, path(key));
            if (text != "true" && text != "false")
                refuse(key, ": " + quoted(text) + " is neither true nor false");
            into = text == "true";
        }
    }
    template <class Unsigned>
    void read_count(std::string_view key, Unsigned& into, Unsigned max) const {
        if (const YAML::Node* at = find(key)) {
            const std::string text = document_.text(*at, path(key));
            Unsigned value = 0;
            const auto [after, error] =
                std::from_chars(text.data(), text.data() + text.size(), value);
            if (text.empty() || error != std::errc() || after != text.data() + text.size() ||
                value > max) {
                refuse(key, ": " + quoted(text) + " is not a whole number from 0 to " +
                                std::to_string(max));
            }
            into = value;
        }
    }
    void read(std::string_view key, milliseconds& into, milliseconds min,
              milliseconds max = duration_max) const {
        if (const YAML::Node* at = find(key)) into = duration_of(*at, path(key), min, max);
    }
    /// The duration that one node says: of a value here, or of an item of a list.
    [[nodiscard]] milliseconds duration_of(const YAML::Node& node, const std::string& at_path,
                                           milliseconds min, milliseconds max) const {
        const std::string text = document_.text(node, at_path);
        static constexpr std::pair<std::string_view, std::uint64_t> units[] = {
            {"ms", 1}, {"s", 1000}, {"m", 60'000}, {"h", 3'600'000}, {"d", 86'400'000}};
        const auto value = with_unit(text, units, static_cast<std::uint64_t>(duration_max.count()));
        if (!value) {
            document_.refuse(node, at_path + ": " + quoted(text) +
                                       " is no duration: write a whole number and a unit (ms, s, "
                                       "m, h, d), such as 10s");
        }
        const milliseconds duration(*value);
        if (duration < min || duration > max) {
            document_.refuse(node, at_path + ": " + quoted(text) + " is out of range: from " +
                                       std::to_string(min.count()) + "ms to " +
                                       std::to_string(max.count()) + "ms");
        }
        return duration;
    }
    /// A number with or without a fraction, in decimal.
    void read_number(std::string_view key, double& into, double min, double max) const;
    /// The items of a list; a single value is a list of one if `single_allowed`.
    [[nodiscard]] std::vector<YAML::Node> items(std::string_view key,
                                                bool single_allowed = false) const;
    void read_size(std::string_view key, std::uint64_t& into) const {
        if (const YAML::Node* at = find(key)) {
            const std::string text = document_.text(*at, path(key));
            static constexpr std::pair<std::string_view, std::uint64_t> units[] = {
                {"B", 1},     {"KiB", 1ull << 10}, {"MiB", 1ull << 20}, {"GiB", 1ull << 30},
                {"KB", 1000}, {"MB", 1000'000},    {"GB", 1000'000'000}};
            const auto value = with_unit(text, units, size_max);
            if (!value) {
                refuse(key, ": " + quoted(text) +
                                " is no size up to 1024GiB: write a whole number and a unit (B, "
                                "KiB, MiB, GiB, KB, MB, GB), such as 32MiB");
            }
            into = *value;
        }
    }
    template <class Enum>
    void read(std::string_view key, Enum& into,
              std::initializer_list<std::pair<std::string_view, Enum>> words,
              Later later = {}) const {
        const YAML::Node* at = find(key);
        if (at == nullptr) return;
        const std::string text = document_.text(*at, path(key));
        std::vector<std::string_view> known;
        for (const auto& [word, value] : words) {
            if (word == text) {
                into = value;
                return;
            }
            known.push_back(word);
        }
        if (std::find(later.begin(), later.end(), text) != later.end()) {
            refuse(key, ": " + quoted(text) + " is not supported by this version; use one of " +
                            joined(known));
        }
        refuse(key, ": " + quoted(text) + " is not one of " + joined(known));
    }
    /// A name that may stand in logs, metrics and keys.
    std::string required_name(std::string_view key) const {
        std::string name;
        read(key, name);
        const bool visible =
            std::all_of(name.begin(), name.end(), [](char c) { return c > 0x20 && c < 0x7F; });
        if (name.empty() || name.size() > name_max_bytes || !visible) {
            refuse(key, " must be a name of 1 to 255 visible ASCII characters");
        }
        return name;
    }

  private:
    [[nodiscard]] std::string where() const { return path_.empty() ? "the file" : path_; }
    [[nodiscard]] std::string in() const { return path_.empty() ? "" : " in " + path_; }

    template <std::size_t N>
    static std::optional<std::uint64_t> with_unit(
        std::string_view text, const std::pair<std::string_view, std::uint64_t> (&units)[N],
        std::uint64_t max) {
        std::uint64_t value = 0;
        const auto [after, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        if (text.empty() || error != std::errc()) return std::nullopt;
        const std::string_view unit = text.substr(static_cast<std::size_t>(after - text.data()));
        if (value == 0 && unit.empty()) return 0;
        for (const auto& [name, factor] : units) {
            if (unit == name)
                return value > max / factor ? std::nullopt : std::optional(value * factor);
        }
        return std::nullopt;
    }

    const Document& document_;
    YAML::Node node_;
    std::string path_;
    std::vector<std::pair<std::string, YAML::Node>> entries_;
};

}  // namespace semel::config
