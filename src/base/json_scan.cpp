#include "base/json_scan.hpp"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <span>

namespace semel::base {

namespace {

/// Values up to this long are their own identity; a longer one is digested.
constexpr std::size_t inline_value_max = 31;
/// Strings longer than this enter the canonical text as a digest, so that a body of images is not
/// copied.
constexpr std::size_t long_string = 1024;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// Bytes of the valid UTF-8 sequence at `p`, or 0.
std::size_t utf8_sequence(const char* p, const char* end) {
    const auto at = [&](std::ptrdiff_t i) { return static_cast<unsigned char>(p[i]); };
    const auto continues = [&](std::ptrdiff_t i) { return (at(i) & 0xC0) == 0x80; };
    const std::ptrdiff_t left = end - p;
    const unsigned char lead = at(0);
    if (lead < 0x80) return 1;
    if (lead < 0xC2) return 0;
    if (lead < 0xE0) return left >= 2 && continues(1) ? 2 : 0;
    if (lead < 0xF0) {
        if (left < 3 || !continues(1) || !continues(2)) return 0;
        if (lead == 0xE0 && at(1) < 0xA0) return 0;   // overlong
        if (lead == 0xED && at(1) >= 0xA0) return 0;  // surrogates
        return 3;
    }
    if (lead > 0xF4 || left < 4 || !continues(1) || !continues(2) || !continues(3)) return 0;
    if (lead == 0xF0 && at(1) < 0x90) return 0;
    if (lead == 0xF4 && at(1) >= 0x90) return 0;
    return 4;
}

/// The four hexadecimal digits at `p`, or -1.
int hex4(const char* p, const char* end) {
    if (end - p < 4) return -1;
    int value = 0;
    for (int i = 0; i < 4; ++i) {
        const char c = p[i];
        int digit = 0;
        if (is_digit(c)) {
            digit = c - '0';
        } else if (c >= 'a' && c <= 'f') {
            digit = c - 'a' + 10;
        } else if (c >= 'A' && c <= 'F') {
            digit = c - 'A' + 10;
        } else {
            return -1;
        }
        value = value * 16 + digit;
    }
    return value;
}

struct Escape {
    std::size_t length = 0;  ///< 0: invalid.
    std::uint32_t code_point = 0;
};

/// The escape at `p`, which points at a backslash.
Escape escape_at(const char* p, const char* end) {
    if (end - p < 2) return {};
    switch (p[1]) {
        case '"':
            return {2, '"'};
        case '\\':
            return {2, '\\'};
        case '/':
            return {2, '/'};
        case 'b':
            return {2, '\b'};
        case 'f':
            return {2, '\f'};
        case 'n':
            return {2, '\n'};
        case 'r':
            return {2, '\r'};
        case 't':
            return {2, '\t'};
        case 'u':
            break;
        default:
            return {};
    }
    const int high = hex4(p + 2, end);
    if (high < 0) return {};
    if (high < 0xD800 || high > 0xDFFF) return {6, static_cast<std::uint32_t>(high)};
    if (high > 0xDBFF || end - p < 12 || p[6] != '\\' || p[7] != 'u') return {};
    const int low = hex4(p + 8, end);
    if (low < 0xDC00 || low > 0xDFFF) return {};
    return {12, 0x10000u + (static_cast<std::uint32_t>(high - 0xD800) << 10) +
                    static_cast<std::uint32_t>(low - 0xDC00)};
}

/// True if one of the eight bytes ends the fast path: a quote, a backslash, a control character or
/// no ASCII.
bool any_special(std::uint64_t word) {
    constexpr std::uint64_t ones = 0x0101010101010101;
    constexpr std::uint64_t tops = 0x8080808080808080;
    const std::uint64_t quote = word ^ (ones * '"');
    const std::uint64_t backslash = word ^ (ones * '\\');
    const std::uint64_t found = ((quote - ones) & ~quote) | ((backslash - ones) & ~backslash) |
                                ((word - ones * 0x20) & ~word) | word;
    return (found & tops) != 0;
}

/// First byte at or after `p` that is not plain: quote, bare control character, or the end; null:
/// broken escape or UTF-8.
const char* skip_string_contents(const char* p, const char* end) {
    while (true) {
        while (end - p >= 8) {
            std::uint64_t word = 0;
            std::memcpy(&word, p, sizeof word);
            if (any_special(word)) break;
            p += 8;
        }
        if (p == end) return p;
        const auto c = static_cast<unsigned char>(*p);
        if (c == '"' || c < 0x20) return p;
        std::size_t step = 1;
        if (c == '\\') {
            step = escape_at(p, end).length;
        } else if (c >= 0x80) {
            step = utf8_sequence(p, end);
        }
        if (step == 0) return nullptr;
        p += step;
    }
}

/// `p` points after the opening quote: the closing quote, or null.
const char* string_end(const char* p, const char* end) {
    const char* at = skip_string_contents(p, end);
    return at != nullptr && at != end && *at == '"' ? at : nullptr;
}

/// After the number at `p`, or null.
const char* number_end(const char* p, const char* end) {
    const auto digits = [&] {
        const char* from = p;
        while (p != end && is_digit(*p)) ++p;
        return p != from;
    };
    if (p != end && *p == '-') ++p;
    if (p != end && *p == '0') {
        ++p;
    } else if (!digits()) {
        return nullptr;
    }
    if (p != end && *p == '.') {
        ++p;
        if (!digits()) return nullptr;
    }
    if (p != end && (*p == 'e' || *p == 'E')) {
        ++p;
        if (p != end && (*p == '+' || *p == '-')) ++p;
        if (!digits()) return nullptr;
    }
    return p;
}

const char* skip_blanks(const char* p, const char* end) {
    while (p != end && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t')) ++p;
    return p;
}

/// After the scalar at `p` (not at the end), or null.
const char* scalar_end(const char* p, const char* end) {
    const auto literal = [&](std::string_view word) -> const char* {
        return std::string_view(p, end).starts_with(word) ? p + word.size() : nullptr;
    };
    switch (*p) {
        case '"': {
            const char* quote = string_end(p + 1, end);
            return quote == nullptr ? nullptr : quote + 1;
        }
        case 't':
            return literal("true");
        case 'f':
            return literal("false");
        case 'n':
            return literal("null");
        default:
            return number_end(p, end);
    }
}

/// Walks the text once and tells the visitor: open(bracket, at), key(contents), scalar(text),
/// comma(), close(bracket, after). key, comma and close may answer false to end the walk. True: one
/// valid value and nothing else.
template <class Visitor>
bool scan(std::string_view text, Visitor& visitor) {
    enum class Expect { value, key, after_value };
    const char* p = text.data();
    const char* const end = p + text.size();
    std::uint64_t object_at = 0;  // bit d: the container at depth d + 1 is an object
    static_assert(json_depth_max == 64, "one bit of object_at a level");
    std::size_t depth = 0;
    Expect expect = Expect::value;
    while (true) {
        p = skip_blanks(p, end);
        if (p == end) return depth == 0 && expect == Expect::after_value;
        const bool in_object = depth > 0 && ((object_at >> (depth - 1)) & 1) != 0;
        switch (expect) {
            case Expect::value: {
                if (*p != '{' && *p != '[') {
                    const char* after = scalar_end(p, end);
                    if (after == nullptr) return false;
                    visitor.scalar(std::string_view(p, after));
                    p = after;
                    expect = Expect::after_value;
                    break;
                }
                if (depth == json_depth_max) return false;
                const bool object = *p == '{';
                visitor.open(*p, p);
                ++depth;
                const std::uint64_t bit = std::uint64_t{1} << (depth - 1);
                object_at = object ? object_at | bit : object_at & ~bit;
                p = skip_blanks(p + 1, end);
                const bool empty = p != end && *p == (object ? '}' : ']');
                expect = empty ? Expect::after_value : object ? Expect::key : Expect::value;
                break;
            }
            case Expect::key: {
                if (*p != '"') return false;
                const char* quote = string_end(p + 1, end);
                if (quote == nullptr) return false;
                if (!visitor.key(std::string_view(p + 1, quote))) return false;
                p = skip_blanks(quote + 1, end);
                if (p == end || *p != ':') return false;
                ++p;
                expect = Expect::value;
                break;
            }
            case Expect::after_value: {
                if (depth == 0) return false;  // trailing bytes
                if (*p == ',') {
                    if (!visitor.comma()) return false;
                    expect = in_object ? Expect::key : Expect::value;
                } else if (*p == (in_object ? '}' : ']')) {
                    if (!visitor.close(*p, p + 1)) return false;
                    --depth;
                } else {
                    return false;
                }
                ++p;
                break;
            }
        }
    }
}

/// Finds the children of the outermost container.
class Children {
  public:
    explicit Children(char container) : container_(container) {}

    void open(char bracket, const char* at) {
        if (depth_ == 0) matches_ = bracket == container_;
        if (depth_ == 1) begin_ = at;
        ++depth_;
    }
    bool key(std::string_view contents) {
        if (depth_ == 1) name_ = contents;
        return true;
    }
    void scalar(std::string_view text) {
        if (depth_ == 1) add(text);
    }
    bool comma() const { return members.size() <= json_members_max; }
    bool close(char, const char* after) {
        --depth_;
        if (depth_ == 1) add(std::string_view(begin_, after));
        return members.size() <= json_members_max;
    }
    [[nodiscard]] bool matches() const { return matches_; }

    std::vector<JsonMember> members;

  private:
    void add(std::string_view value) {
        if (members.empty()) members.reserve(8);
        members.push_back({name_, value});
    }

    char container_;
    bool matches_ = false;
    std::size_t depth_ = 0;
    const char* begin_ = nullptr;
    std::string_view name_;
};

/// Writes the canonical text: no white space, members sorted, each member ended by a comma (so that
/// they can be moved as they are), long strings as '#' and their digest. A '#' begins no JSON
/// value, so the text stays injective.
class Canonicaliser {
  public:
    struct Member {
        std::string_view name;
        std::size_t begin = 0;  ///< Of `"name":value,` in the text.
        std::size_t end = 0;
    };

    explicit Canonicaliser(std::size_t size_hint) {
        text_.reserve(std::min<std::size_t>(size_hint, 1 << 20) + 16);
        members_.reserve(16);
        frames_.reserve(8);
    }

    void open(char bracket, const char*) {
        frames_.push_back(
            {.object = bracket == '{', .begin = text_.size(), .first_member = members_.size()});
        text_ += bracket;
    }
    bool key(std::string_view contents) {
        if (members_.size() >= json_members_max) return false;
        Frame& frame = frames_.back();
        if (members_.size() > frame.first_member && !(members_.back().name < contents))
            frame.sorted = false;
        if (contents.find('\\') != std::string_view::npos) frame.escaped_names = true;
        members_.push_back({contents, text_.size(), 0});
        text_ += '"';
        text_ += contents;
        text_ += "\":";
        return true;
    }
    void scalar(std::string_view value) {
        if (value.size() <= long_string || value.front() != '"') {
            text_ += value;
            return;
        }
        text_ += '#';
        text_ += sha256(value).view();
    }
    bool comma() {
        text_ += ',';
        if (frames_.back().object) members_.back().end = text_.size();
        return true;
    }
    bool close(char bracket, const char*) {
        const Frame frame = frames_.back();
        frames_.pop_back();
        if (frame.object && members_.size() > frame.first_member) {
            text_ += ',';
            members_.back().end = text_.size();
            const auto members = std::span(members_).subspan(frame.first_member);
            if (!frame.sorted && !sort(members)) return false;
            if (frame.escaped_names && decoded_names_repeat(members)) return false;
            if (frames_.empty()) {  // the outermost object: its members are digested one by one, in
                                    // place
                text_ += bracket;
                return true;
            }
            if (!frame.sorted) reorder(members, frame.begin + 1);
        }
        members_.resize(frame.first_member);
        text_ += bracket;
        return true;
    }

    [[nodiscard]] const std::string& text() const { return text_; }
    /// Of the outermost object, sorted.
    [[nodiscard]] const std::vector<Member>& members() const { return members_; }

  private:
    struct Frame {
        bool object = false;
        bool sorted = true;  ///< Strictly ascending so far, so without repeated spellings.
        bool escaped_names = false;
        std::size_t begin = 0;
        std::size_t first_member = 0;
    };

    /// False: a name is repeated.
    static bool sort(std::span<Member> members) {
        std::sort(members.begin(), members.end(),
                  [](const Member& a, const Member& b) { return a.name < b.name; });
        return std::adjacent_find(members.begin(), members.end(),
                                  [](const Member& a, const Member& b) {
                                      return a.name == b.name;
                                  }) == members.end();
    }
    static bool decoded_names_repeat(std::span<const Member> members) {
        std::vector<std::string> names;
        names.reserve(members.size());
        for (const Member& member : members)
            names.push_back(unescape(member.name).value_or(std::string()));
        std::sort(names.begin(), names.end());
        return std::adjacent_find(names.begin(), names.end()) != names.end();
    }
    void reorder(std::span<const Member> members, std::size_t begin) {
        std::string sorted;
        sorted.reserve(text_.size() - begin);
        for (const Member& member : members)
            sorted.append(text_, member.begin, member.end - member.begin);
        text_.replace(begin, std::string::npos, sorted);
    }

    std::string text_;
    std::vector<Frame> frames_;
    std::vector<Member> members_;
};

/// Short values stand for themselves behind their length (below 0x80), longer ones are a digest
/// with the top bit set.
Digest identity_of(std::string_view value) {
    Digest identity;
    if (value.size() <= inline_value_max) {
        identity.bytes[0] = static_cast<std::uint8_t>(value.size());
        std::memcpy(identity.bytes.data() + 1, value.data(), value.size());
        return identity;
    }
    identity = sha256(value);
    identity.bytes[0] |= 0x80;
    return identity;
}

void append_utf8(std::string& out, std::uint32_t code_point) {
    const auto put = [&](std::uint32_t byte) { out += static_cast<char>(byte); };
    if (code_point < 0x80) {
        put(code_point);
    } else if (code_point < 0x800) {
        put(0xC0 | code_point >> 6);
        put(0x80 | (code_point & 0x3F));
    } else if (code_point < 0x10000) {
        put(0xE0 | code_point >> 12);
        put(0x80 | (code_point >> 6 & 0x3F));
        put(0x80 | (code_point & 0x3F));
    } else {
        put(0xF0 | code_point >> 18);
        put(0x80 | (code_point >> 12 & 0x3F));
        put(0x80 | (code_point >> 6 & 0x3F));
        put(0x80 | (code_point & 0x3F));
    }
}

}  // namespace

std::optional<std::vector<JsonMember>> top_level_members(std::string_view json) {
    Children children('{');
    if (!scan(json, children) || !children.matches()) return std::nullopt;
    return std::move(children.members);
}

std::optional<std::vector<std::string_view>> array_elements(std::string_view json) {
    Children children('[');
    if (!scan(json, children) || !children.matches()) return std::nullopt;
    std::vector<std::string_view> elements;
    elements.reserve(children.members.size());
    for (const JsonMember& member : children.members) elements.push_back(member.value);
    return elements;
}

std::optional<std::string_view> find_member(const std::vector<JsonMember>& members,
                                            std::string_view name) {
    for (auto member = members.rbegin(); member != members.rend(); ++member) {
        if (member->name == name && name.find('\\') == std::string_view::npos) return member->value;
        if (member->name.find('\\') != std::string_view::npos && unescape(member->name) == name)
            return member->value;
    }
    return std::nullopt;
}

std::optional<CanonicalJson> canonical(std::string_view json) {
    Canonicaliser canonicaliser(json.size());
    if (!scan(json, canonicaliser)) return std::nullopt;
    const std::string& text = canonicaliser.text();
    CanonicalJson out;
    if (text.front() != '{') {
        out.digest = Sha256().update("v").update(text).finish();
        return out;
    }
    // Names are self-delimiting (quotes) and identities of one length, so the sequence is
    // injective.
    std::string sequence("o");
    sequence.reserve(1 + canonicaliser.members().size() * 48);
    out.members.reserve(canonicaliser.members().size());
    for (const Canonicaliser::Member& member : canonicaliser.members()) {
        const std::size_t value_begin = member.begin + member.name.size() + 3;
        const Digest identity =
            identity_of(std::string_view(text).substr(value_begin, member.end - 1 - value_begin));
        out.members.emplace_back(member.name, identity);
        sequence += '"';
        sequence += member.name;
        sequence += '"';
        sequence += identity.view();
    }
    out.digest = sha256(sequence);
    return out;
}

std::optional<std::string> unescape(std::string_view raw) {
    const char* const begin = raw.data();
    const char* const end = begin + raw.size();
    if (skip_string_contents(begin, end) != end) return std::nullopt;
    std::string out;
    out.reserve(raw.size());
    std::size_t at = 0;
    while (true) {
        const std::size_t backslash = raw.find('\\', at);
        out.append(raw.substr(at, backslash - at));
        if (backslash == std::string_view::npos) return out;
        const Escape escape = escape_at(begin + backslash, end);
        append_utf8(out, escape.code_point);
        at = backslash + escape.length;
    }
}

std::optional<std::string> json_string(std::string_view raw) {
    if (raw.size() < 2 || raw.front() != '"' || raw.back() != '"') return std::nullopt;
    return unescape(raw.substr(1, raw.size() - 2));
}

std::optional<bool> json_bool(std::string_view raw) {
    if (raw == "true") return true;
    if (raw == "false") return false;
    return std::nullopt;
}

std::optional<std::int64_t> json_integer(std::string_view raw) {
    const char* const end = raw.data() + raw.size();
    if (raw.empty() || number_end(raw.data(), end) != end) return std::nullopt;
    std::int64_t value = 0;
    const auto [after, error] = std::from_chars(raw.data(), end, value);
    if (error != std::errc() || after != end) return std::nullopt;
    return value;
}

bool json_is_null(std::string_view raw) { return raw == "null"; }

void append_json_string(std::string& out, std::string_view text) {
    static constexpr char digits[] = "0123456789abcdef";
    out += '"';
    const char* p = text.data();
    const char* const end = p + text.size();
    while (p != end) {
        const auto c = static_cast<unsigned char>(*p);
        if (c >= 0x80) {
            const std::size_t length = utf8_sequence(p, end);
            out.append(length == 0 ? std::string_view("\xEF\xBF\xBD")
                                   : std::string_view(p, length));
            p += std::max<std::size_t>(length, 1);
            continue;
        }
        ++p;
        switch (c) {
            case '"':
                out += "\\\"";
                break;
            case '\\':
                out += "\\\\";
                break;
            case '\n':
                out += "\\n";
                break;
            case '\r':
                out += "\\r";
                break;
            case '\t':
                out += "\\t";
                break;
            default:
                if (c < 0x20) {
                    out += "\\u00";
                    out += digits[c >> 4];
                    out += digits[c & 15];
                } else {
                    out += static_cast<char>(c);
                }
        }
    }
    out += '"';
}

}  // namespace semel::base
