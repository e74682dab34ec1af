#include "consumer/strategies/sql_template.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <optional>
#include <utility>

#include "inbox/words.hpp"

namespace semel::consumer {
namespace {

using sql::Dialect;

constexpr std::size_t name_length_max = 63;

bool blank(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }
bool digit(char c) { return c >= '0' && c <= '9'; }
bool name_start(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0 || c == '_'; }
bool name_part(char c) { return name_start(c) || digit(c); }

base::Error wrong(std::string detail) {
    return {.code = base::ErrorCode::invalid_argument, .detail = std::move(detail)};
}

std::size_t behind(std::string_view text, std::string_view what, std::size_t from) {
    const std::size_t found = text.find(what, from);
    return found == std::string_view::npos ? text.size() : found + what.size();
}

/// The end of the comment that begins at `at`; `at` itself if none does.
std::size_t end_of_comment(Dialect dialect, std::string_view text, std::size_t at) {
    const std::string_view rest = text.substr(at);
    const bool mysql = dialect == Dialect::mysql;
    if (mysql && rest[0] == '#') return behind(text, "\n", at);
    if (rest.starts_with("--") && (!mysql || rest.size() == 2 || blank(rest[2])))
        return behind(text, "\n", at);
    if (!rest.starts_with("/*")) return at;
    if (mysql) return behind(text, "*/", at + 2);
    std::size_t depth = 0;  // PostgreSQL's nest
    for (std::size_t i = at; i < text.size();) {
        const std::string_view two = text.substr(i, 2);
        if (two == "/*") {
            ++depth;
            i += 2;
        } else if (two == "*/") {
            i += 2;
            if (--depth == 0) return i;
        } else {
            ++i;
        }
    }
    return text.size();
}

/// The end of the string or quoted name that begins at `at`; `at` itself if none does.
std::size_t end_of_quoted(Dialect dialect, std::string_view text, std::size_t at) {
    const char c = text[at];
    const bool mysql = dialect == Dialect::mysql;
    if (!mysql && c == '$') {  // $tag$ ... $tag$
        std::size_t end = at + 1;
        while (end < text.size() && name_part(text[end])) ++end;
        const bool quotes = end < text.size() && text[end] == '$' && !digit(text[at + 1]) &&
                            (at == 0 || !name_part(text[at - 1]));
        return quotes ? behind(text, text.substr(at, end + 1 - at), end + 1) : at;
    }
    if (c != '\'' && c != '"' && !(mysql && c == '`')) return at;
    bool escapes = mysql && c != '`';
    if (!mysql && c == '\'' && at > 0 && (text[at - 1] == 'E' || text[at - 1] == 'e'))
        escapes = at == 1 || !name_part(text[at - 2]);
    for (std::size_t i = at + 1; i < text.size(); ++i) {
        if (escapes && text[i] == '\\')
            ++i;
        else if (text[i] == c)
            return i + 1;  // a doubled quote ends one string and begins the next: the same to us
    }
    return text.size();
}

bool sign(char c) { return c == '+' || c == '-' || c == '*' || c == '/' || c == '%'; }

/// Whether what stands before a place (without comments) or behind it computes with it.
bool computes(std::string_view before, std::string_view after) {
    while (!before.empty() && blank(before.back())) before.remove_suffix(1);
    while (!after.empty() && blank(after.front())) after.remove_prefix(1);
    if (!before.empty() && sign(before.back())) return true;
    const bool comment = after.starts_with("--") || after.starts_with("/*");
    if (!after.empty() && sign(after.front()) && !comment && !after.starts_with("->")) return true;
    std::size_t word = before.size();
    while (word > 0 && name_part(before[word - 1])) --word;
    std::string last(before.substr(word));
    std::transform(last.begin(), last.end(), last.begin(),
                   [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
    constexpr std::array<std::string_view, 4> words{"LIMIT", "OFFSET", "DIV", "MOD"};
    return std::find(words.begin(), words.end(), last) != words.end();
}

}  // namespace

base::Result<SqlTemplate> SqlTemplate::parse(Dialect dialect, std::string_view text,
                                             std::span<const std::string> names,
                                             const std::string& subject) {
    SqlTemplate out;
    out.dialect_ = dialect;
    std::string piece, code;  // `code`: what was read so far, without comments
    bool over = false;        // a semicolon was read
    for (std::size_t i = 0; i < text.size();) {
        if (const std::size_t end = end_of_comment(dialect, text, i); end != i) {
            piece += ' ';
            code += ' ';
            i = end;
            continue;
        }
        const char c = text[i];
        if (over && !blank(c) && c != ';')
            return wrong(subject + " is several statements: write each as one of its own");
        if (const std::size_t end = end_of_quoted(dialect, text, i); end != i) {
            piece += text.substr(i, end - i);
            code += '\'';
            i = end;
            continue;
        }
        const std::string_view next = text.substr(i + 1);
        if (c == ';') {
            over = true;
            ++i;
            continue;
        }
        const bool own = dialect == Dialect::mysql ? c == '?'
                                                   : c == '$' && !next.empty() && digit(next[0]) &&
                                                         (i == 0 || !name_part(text[i - 1]));
        if (own) {
            return wrong(subject + " has a place of the database's own (" + c +
                         "): write :name, and name it under params");
        }
        if (c == ':' && next.starts_with(":")) {
            piece += "::";
            code += "::";
            i += 2;
            continue;
        }
        if (c != ':' || next.empty() || !name_start(next[0])) {
            piece += c;
            code += c;
            ++i;
            continue;
        }
        std::size_t end = i + 1;
        while (end < text.size() && name_part(text[end])) ++end;
        const std::string_view name = text.substr(i + 1, end - i - 1);
        const auto found = std::find(names.begin(), names.end(), name);
        if (found == names.end())
            return wrong(subject + " uses :" + std::string(name) +
                         ", which is not among its params: add it there");
        out.pieces_.push_back(std::exchange(piece, {}));
        out.places_.push_back(
            {static_cast<std::size_t>(found - names.begin()), computes(code, text.substr(end))});
        code += "'";
        i = end;
    }
    while (!piece.empty() && blank(piece.back())) piece.pop_back();
    out.pieces_.push_back(std::move(piece));
    std::string whole;
    for (const std::string& one : out.pieces_) whole += one + " NULL ";
    if (inbox::controls_transaction(whole.substr(0, whole.size() - 6), dialect)) {
        return wrong(subject + " (" + inbox::first_word(whole) +
                     ") would end or begin a transaction, or has no words: the effect's "
                     "transaction is semel's");
    }
    return out;
}

bool SqlTemplate::uses(std::size_t index) const {
    return std::any_of(places_.begin(), places_.end(),
                       [&](const Place& place) { return place.name == index; });
}

sql::Statement SqlTemplate::bind(std::span<const Extracted> values) const {
    sql::Statement statement;
    for (std::size_t i = 0; i < places_.size(); ++i) {
        statement.text += pieces_[i];
        const Extracted& value = values[places_[i].name];
        if (dialect_ == Dialect::postgres) {
            statement.text += '$';
            statement.text += std::to_string(i + 1);
            // $1 must not run together with what stands behind it.
            if (!pieces_[i + 1].empty() && digit(pieces_[i + 1][0])) statement.text += ' ';
        } else if (places_[i].arithmetic && value.number && value.text) {
            // Digits, a point and a sign: nothing else can come out of plain_number().
            const std::string number = plain_number(*value.text);
            if (!number.empty()) {
                statement.text += number[0] == '-' ? '(' + number + ')' : number;
                continue;
            }
            statement.text += '?';
        } else {
            statement.text += '?';
        }
        statement.parameters.push_back(parameter_of(dialect_, value));
    }
    statement.text += pieces_.back();
    return statement;
}

sql::Parameter parameter_of(Dialect dialect, const Extracted& value) {
    if (!value.text) return std::monostate{};
    if (value.boolean && dialect == Dialect::mysql)
        return std::int64_t{*value.text == "true" ? 1 : 0};  // its BOOLEAN is a number
    if (value.number) {
        std::string plain = plain_number(*value.text);
        if (!plain.empty()) return plain;
    }
    return *value.text;
}

std::string plain_number(std::string_view json) {
    std::size_t i = 0;
    const bool negative = !json.empty() && json[0] == '-';
    if (negative) ++i;
    const auto digits = [&] {
        const std::size_t from = i;
        while (i < json.size() && digit(json[i])) ++i;
        return std::string(json.substr(from, i - from));
    };
    std::string whole = digits(), fraction;
    if (whole.empty()) return {};
    if (i < json.size() && json[i] == '.') {
        ++i;
        fraction = digits();
        if (fraction.empty()) return {};
    }
    int exponent = 0;
    if (i < json.size() && (json[i] == 'e' || json[i] == 'E')) {
        ++i;
        const bool down = i < json.size() && json[i] == '-';
        if (i < json.size() && (json[i] == '-' || json[i] == '+')) ++i;
        const char* end = json.data() + json.size();
        const auto [read, error] = std::from_chars(json.data() + i, end, exponent);
        if (error != std::errc{} || read != end || exponent < 0 || exponent > number_exponent_max)
            return {};
        i = json.size();
        if (down) exponent = -exponent;
    }
    if (i != json.size()) return {};
    for (; exponent > 0; --exponent) {
        whole += fraction.empty() ? '0' : fraction[0];
        if (!fraction.empty()) fraction.erase(0, 1);
    }
    for (; exponent < 0; ++exponent) {
        fraction.insert(0, 1, whole.empty() ? '0' : whole.back());
        if (!whole.empty()) whole.pop_back();
    }
    whole.erase(0, std::min(whole.find_first_not_of('0'), whole.size()));
    if (whole.empty()) whole = "0";
    if (fraction.find_first_not_of('0') == std::string::npos) fraction.clear();
    return (negative ? "-" : "") + whole + (fraction.empty() ? "" : "." + fraction);
}

base::Result<std::string> quoted_name(Dialect dialect, std::string_view name, bool with_schema,
                                      const std::string& subject) {
    const char quote = dialect == Dialect::mysql ? '`' : '"';
    const std::string whole(name);
    std::string out;
    for (int parts = 0;; ++parts) {
        const std::size_t dot = name.find('.');
        const std::string_view part = name.substr(0, dot);
        const bool fine =
            !part.empty() && part.size() <= name_length_max && name_start(part[0]) &&
            std::all_of(part.begin(), part.end(), [](char c) { return name_part(c) || c == '$'; });
        if (!fine || parts > (with_schema ? 1 : 0)) {
            return wrong(subject + " `" + whole +
                         "`: 1 to 63 of letters, digits, _ and $ are a name" +
                         (with_schema ? ", and schema.name is allowed" : ""));
        }
        out += quote;
        out += part;
        out += quote;
        if (dot == std::string_view::npos) return out;
        out += '.';
        name.remove_prefix(dot + 1);
    }
}

}  // namespace semel::consumer
