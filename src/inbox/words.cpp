#include "inbox/words.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <vector>

namespace semel::inbox {
namespace {

using sql::Dialect;

bool blank(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }
bool word_character(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

/// The end of the comment, string or quoted name that begins at `at`; `at` itself if none does.
std::size_t end_of_quoted(std::string_view text, std::size_t at) {
    const auto behind = [&](std::string_view what, std::size_t from) {
        const std::size_t found = text.find(what, from);
        return found == std::string_view::npos ? text.size() : found + what.size();
    };
    const std::string_view rest = text.substr(at);
    if (rest.starts_with("--")) return behind("\n", at);
    if (rest.starts_with("/*")) return behind("*/", at + 2);
    const char quote = rest[0];
    if (quote != '\'' && quote != '"' && quote != '`') return at;
    for (std::size_t i = at + 1; i < text.size(); ++i) {
        if (text[i] == '\\' && quote != '`')
            ++i;
        else if (text[i] == quote)
            return i + 1;
    }
    return text.size();
}

/// The first words in capitals; quoted names without their quotes.
std::vector<std::string> words_of(std::string_view text, std::size_t most) {
    std::vector<std::string> words;
    for (std::size_t i = 0; i < text.size() && words.size() < most;) {
        if (blank(text[i])) {
            ++i;
            continue;
        }
        const bool comment = text.substr(i, 2) == "--" || text.substr(i, 2) == "/*";
        std::size_t end = end_of_quoted(text, i);
        std::string_view word;
        if (comment) {
            i = end;
            continue;
        }
        if (end > i) {
            word = text.substr(i + 1, end - i - 1);
            if (!word.empty()) word.remove_suffix(1);
        } else {
            while (end < text.size() && word_character(text[end])) ++end;
            if (end == i) break;
            word = text.substr(i, end - i);
        }
        std::string& one = words.emplace_back(word);
        std::transform(one.begin(), one.end(), one.begin(),
                       [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
        i = end;
    }
    return words;
}

bool several(std::string_view text) {
    for (std::size_t i = 0; i < text.size();) {
        const std::size_t end = end_of_quoted(text, i);
        if (end == i && text[i] == ';') return !words_of(text.substr(i + 1), 1).empty();
        i = std::max(end, i + 1);
    }
    return false;
}

/// Statements of MySQL and MariaDB that end the transaction before they run.
bool commits_silently(const std::vector<std::string>& words) {
    constexpr std::array<std::string_view, 13> first{
        "CREATE", "ALTER",  "DROP",    "RENAME",   "TRUNCATE", "GRANT",  "REVOKE",
        "LOCK",   "UNLOCK", "ANALYZE", "OPTIMIZE", "REPAIR",   "INSTALL"};
    if (words[0] == "SET")
        return words.size() > 1 &&
               std::find(words.begin(), words.end(), "AUTOCOMMIT") != words.end();
    const bool temporary = words.size() > 1 && words[1] == "TEMPORARY";
    return !temporary && std::find(first.begin(), first.end(), words[0]) != first.end();
}

}  // namespace

std::string first_word(std::string_view statement) {
    std::vector<std::string> words = words_of(statement, 1);
    return words.empty() ? "a statement without words" : std::move(words[0]);
}

bool controls_transaction(std::string_view statement, Dialect dialect) {
    const std::vector<std::string> words = words_of(statement, 4);
    if (words.empty() || several(statement)) return true;
    const std::string& first = words[0];
    constexpr std::array<std::string_view, 6> ends{"BEGIN", "START", "COMMIT",
                                                   "END",   "ABORT", "XA"};
    if (std::find(ends.begin(), ends.end(), first) != ends.end()) return true;
    if (first == "PREPARE") return words.size() > 1 && words[1] == "TRANSACTION";
    if (first == "ROLLBACK" || first == "SAVEPOINT" || first == "RELEASE") {
        const bool whole =
            first == "ROLLBACK" && std::find(words.begin(), words.end(), "TO") == words.end();
        return whole || words.back() == "SEMEL";
    }
    return dialect == Dialect::mysql && commits_silently(words);
}

}  // namespace semel::inbox
