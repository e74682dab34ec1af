#include "deadletter/cause.hpp"

#include <cstddef>

#include "base/hash.hpp"
#include "deadletter/letter.hpp"

namespace semel::deadletter {
namespace {

constexpr std::size_t fingerprint_bytes = 8;

bool blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
bool digit(char c) { return c >= '0' && c <= '9'; }
/// Of a word: letters, digits, bytes of other alphabets.
bool letter(char c) {
    return digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
           static_cast<unsigned char>(c) >= 0x80;
}
/// Joins the parts of ids, addresses and numbers where letters stand on both sides.
bool joint(char c) { return c == '-' || c == '.' || c == ':' || c == '@' || c == '+'; }

/// Behind the closing quote of the value quoted at `at`; 0: there is none, or it is an apostrophe.
std::size_t quoted_end(std::string_view text, std::size_t at) {
    const char quote = text[at];
    if (quote != '"' && quote != '\'' && quote != '`') return 0;
    if (at > 0 && letter(text[at - 1])) return 0;
    for (std::size_t i = at + 1; i < text.size(); ++i) {
        if (text[i] == '\\') {
            ++i;
        } else if (text[i] == quote && (i + 1 == text.size() || !letter(text[i + 1]))) {
            return i + 1;
        }
    }
    return 0;
}

}  // namespace

std::string normalized(std::string_view text) {
    text = text.substr(0, letter_error_message_max_bytes);
    std::string out;
    for (std::size_t at = 0; at < text.size();) {
        if (blank(text[at])) {
            if (!out.empty() && out.back() != ' ') out += ' ';
            ++at;
        } else if (const std::size_t end = quoted_end(text, at); end != 0) {
            out += '?';
            at = end;
        } else if (letter(text[at])) {
            std::size_t word = at;
            bool number = false;
            while (word < text.size() &&
                   (letter(text[word]) ||
                    (joint(text[word]) && word + 1 < text.size() && letter(text[word + 1])))) {
                number = number || digit(text[word]);
                ++word;
            }
            if (number) {
                out += '#';
            } else {
                out += text.substr(at, word - at);
            }
            at = word;
        } else {
            out += text[at++];
        }
    }
    while (!out.empty() && out.back() == ' ') out.pop_back();
    return out;
}

std::string fingerprint_of(std::string_view error_class, std::string_view error_message) {
    const base::Digest digest = base::sha256(normalized(error_message));
    return std::string(error_class) + ":" + base::hex(digest.view().substr(0, fingerprint_bytes));
}

}  // namespace semel::deadletter
