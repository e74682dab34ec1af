#include "http/parser.hpp"

#include <llhttp.h>

#include <cstring>

#include "base/assert.hpp"

static_assert(LLHTTP_STRICT_MODE == 1, "without strict mode llhttp accepts garbage after a chunk");

namespace semel::http {

namespace {

std::string_view trimmed(std::string_view s) {
    while (!s.empty() && (s.back() == ' ' || s.back() == '\t')) s.remove_suffix(1);
    while (!s.empty() && (s.front() == ' ' || s.front() == '\t')) s.remove_prefix(1);
    return s;
}

bool allowed_method(std::uint8_t method) {
    switch (method) {
        case HTTP_GET:
        case HTTP_HEAD:
        case HTTP_POST:
        case HTTP_PUT:
        case HTTP_PATCH:
        case HTTP_DELETE:
        case HTTP_OPTIONS:
            return true;
        default:
            return false;
    }
}

bool plain_host(std::string_view host) {
    for (const char c : host) {
        if (c <= ' ' || c == '/' || c == '@' || c == ',' || c == '?' || c == '#' || c == '\\') {
            return false;
        }
    }
    return true;
}

}  // namespace

// The callbacks' state. Header names and values are contiguous, because the whole head is parsed in
// one call.
struct Parser::Llhttp {
    explicit Llhttp(Parser& p) : owner(p) {}

    llhttp_t machine{};
    Parser& owner;
    std::size_t hosts = 0;
    std::string_view host;
    std::size_t codings = 0;
    std::string_view coding;
    bool other_expectation = false;
    bool upgrade = false;
    bool headers_done = false;
    bool message_done = false;
    bool over_limit = false;
    // Of take_body: where decoded bytes go, and the accounts of framing bytes.
    char* input = nullptr;
    char* decoded = nullptr;
    std::size_t decoded_size = 0;
    std::uint64_t taken_before = 0;  ///< Body phase bytes of earlier calls.
    std::uint64_t body_total = 0;
    std::uint64_t last_body_end = 0;

    static Llhttp& of(llhttp_t* m) { return *static_cast<Llhttp*>(m->data); }
    static const llhttp_settings_t& settings();

    void begin(Kind kind) {
        llhttp_init(&machine, kind == Kind::request ? HTTP_REQUEST : HTTP_RESPONSE, &settings());
        machine.data = this;
        hosts = codings = 0;
        host = coding = {};
        other_expectation = upgrade = headers_done = message_done = over_limit = false;
        taken_before = body_total = last_body_end = 0;
    }

    [[nodiscard]] bool framing_over_limit(std::uint64_t position) const {
        const std::uint64_t framing = position - body_total;
        return position - last_body_end > kFramingGapMaxBytes ||
               framing > kFramingBaseMaxBytes + kFramingPerBodyByte * body_total;
    }
};

const llhttp_settings_t& Parser::Llhttp::settings() {
    static const llhttp_settings_t shared = [] {
        llhttp_settings_t s;
        llhttp_settings_init(&s);
        s.on_url = [](llhttp_t* m, const char* at, std::size_t n) {
            MessageHead& head = of(m).owner.head_;
            head.target = head.target.empty()
                              ? std::string_view(at, n)
                              : std::string_view(head.target.data(), head.target.size() + n);
            return 0;
        };
        s.on_header_field = [](llhttp_t* m, const char* at, std::size_t n) {
            Llhttp& self = of(m);
            if (!self.headers_done) self.owner.head_.headers.push_back({{at, n}, {}});
            return 0;  // trailers are dropped
        };
        s.on_header_value = [](llhttp_t* m, const char* at, std::size_t n) {
            Llhttp& self = of(m);
            if (self.headers_done || self.owner.head_.headers.empty()) return 0;
            std::string_view& value = self.owner.head_.headers.back().value;
            value = value.empty() ? std::string_view(at, n)
                                  : std::string_view(value.data(), value.size() + n);
            return 0;
        };
        s.on_header_value_complete = [](llhttp_t* m) {
            Llhttp& self = of(m);
            if (self.headers_done || self.owner.head_.headers.empty()) return 0;
            Header& h = self.owner.head_.headers.back();
            h.value = trimmed(h.value);
            switch (h.name.size()) {
                case 4:
                    if (name_is(h.name, "host")) {
                        ++self.hosts;
                        self.host = h.value;
                    }
                    break;
                case 6:
                    if (name_is(h.name, "expect")) {
                        if (name_is(h.value, "100-continue")) {
                            self.owner.head_.expect_continue = true;
                        } else {
                            self.other_expectation = true;
                        }
                    }
                    break;
                case 7:
                    // RFC 9110 7.8 lets a server ignore an upgrade. Java's own client offers h2c
                    // with every request.
                    if (name_is(h.name, "upgrade") && !name_is(h.value, "h2c")) self.upgrade = true;
                    break;
                case 17:
                    if (name_is(h.name, "transfer-encoding")) {
                        ++self.codings;
                        self.coding = h.value;
                    }
                    break;
                default:
                    break;
            }
            return 0;
        };
        s.on_headers_complete = [](llhttp_t* m) {
            Llhttp& self = of(m);
            self.headers_done = true;
            Parser& parser = self.owner;
            parser.head_.minor = m->http_minor;
            parser.head_.chunked = (m->flags & F_CHUNKED) != 0;
            if ((m->flags & F_CONTENT_LENGTH) != 0) parser.head_.content_length = m->content_length;
            if (parser.kind_ == Kind::request) {
                parser.check_request();
            } else {
                parser.check_response();
            }
            if (parser.state_ == State::refused) return -1;
            m->upgrade = 0;  // an ignored one (h2c): what follows is HTTP/1.1
            return parser.head_.bodyless ? 1 : 0;
        };
        s.on_chunk_header = [](llhttp_t* m) {
            if (m->content_length <= kLengthMax) return 0;
            of(m).over_limit = true;
            return -1;
        };
        s.on_body = [](llhttp_t* m, const char* at, std::size_t n) -> int {
            Llhttp& self = of(m);
            const auto offset = static_cast<std::size_t>(at - self.input);
            if (self.framing_over_limit(self.taken_before + offset)) {
                self.over_limit = true;
                return HPE_USER;
            }
            if (self.decoded == nullptr) {
                self.decoded = self.input + offset;
            } else if (self.decoded + self.decoded_size != at) {
                // Behind what llhttp has read already, so that its input is not disturbed.
                std::memmove(self.decoded + self.decoded_size, at, n);
            }
            self.decoded_size += n;
            self.body_total += n;
            self.last_body_end = self.taken_before + offset + n;
            return 0;
        };
        s.on_message_complete = [](llhttp_t* m) -> int {
            of(m).message_done = true;
            return HPE_PAUSED;
        };
        return s;
    }();
    return shared;
}

Parser::Parser(Kind kind, ParserLimits limits)
    : kind_(kind), limits_(limits), llhttp_(std::make_unique<Llhttp>(*this)) {
    begin();
}
Parser::~Parser() = default;

void Parser::begin(bool bodyless) {
    state_ = State::head;
    head_.text.clear();
    head_.headers.clear();
    head_.method = head_.target = {};
    head_.status = 0;
    head_.content_length.reset();
    head_.chunked = head_.keep_alive = head_.to_eof = head_.bodyless = head_.expect_continue =
        false;
    line_begin_ = scanned_ = lines_ = blank_bytes_ = 0;
    answers_head_ = bodyless;
}

void Parser::refuse(int status, const char* code, const char* reason) {
    if (state_ == State::refused) return;  // the first reason counts
    state_ = State::refused;
    refusal_ = {status, code, reason};
}

// One line of the head without its CRLF. False: refused. llhttp accepts folded lines, joins their
// value and lets a header block end in a bare LF, so lines are looked at before it sees them.
bool Parser::scan_line(std::size_t line_begin, std::size_t line_end) {
    if (lines_ > 0 && (head_.text[line_begin] == ' ' || head_.text[line_begin] == '\t')) {
        malformed("a header line starts with a blank (folded headers are refused)");
        return false;
    }
    if (lines_ > 0 && head_.text[line_begin] == ':') {
        malformed("a header line has no name");
        return false;
    }
    if (lines_ == 0 && kind_ == Kind::request) {
        const std::string_view line(head_.text.data() + line_begin, line_end - line_begin);
        const std::size_t first = line.find(' ');
        const std::size_t last = line.rfind(' ');
        if (first == std::string_view::npos || last == first || line[first + 1] == ' ' ||
            line[last - 1] == ' ') {
            malformed("the request line is not \"METHOD target HTTP/1.1\"");
            return false;
        }
        if (last - first - 1 > limits_.target_max_bytes) {
            refuse(414, "target_too_long", "the request target is too long");
            return false;
        }
    }
    if (++lines_ > limits_.headers_max + 1) {
        refuse(431, "headers_too_many", "the request has too many header lines");
        return false;
    }
    return true;
}

Parser::Taken Parser::take_head(std::string_view bytes) {
    SEMEL_ASSERT(state_ == State::head, "take_head() outside of a head");
    std::size_t used = 0;
    while (head_.text.empty() && used < bytes.size() &&
           (bytes[used] == '\r' || bytes[used] == '\n')) {
        const char expected = blank_bytes_ % 2 == 0 ? '\r' : '\n';
        if (kind_ == Kind::response || bytes[used] != expected ||
            blank_bytes_ == 2 * kBlankLinesMax) {
            malformed("the message starts with empty lines");
            return {used, {}};
        }
        ++blank_bytes_;
        ++used;
    }
    if (used == bytes.size()) return {used, {}};
    if (blank_bytes_ % 2 != 0) {
        malformed("a bare CR stands before the request line");
        return {used, {}};
    }
    if (head_.text.empty() && kind_ == Kind::request && (bytes[used] < 'A' || bytes[used] > 'Z')) {
        // Seen at once: TLS or another protocol on this port shall not wait for a head's time-out.
        malformed("the request does not start with a method");
        return {used, {}};
    }
    if (head_.text.empty() && kind_ == Kind::response && bytes[used] != 'H') {
        malformed("the answer does not start with HTTP/");
        return {used, {}};
    }

    const std::size_t kept = head_.text.size();
    const std::size_t room = limits_.head_max_bytes - kept;
    const std::string_view offered = bytes.substr(used, room);
    head_.text.append(offered);
    const char* const base = head_.text.data();
    while (scanned_ < head_.text.size()) {
        const void* found = std::memchr(base + scanned_, '\n', head_.text.size() - scanned_);
        if (found == nullptr) {
            scanned_ = head_.text.size();
            break;
        }
        const auto lf = static_cast<std::size_t>(static_cast<const char*>(found) - base);
        if (request_line_too_long(lf)) {
            refuse(414, "target_too_long", "the request target is too long");
            return {used, {}};
        }
        if (lf == 0 || base[lf - 1] != '\r') {
            malformed("a line of the head ends in a bare LF");
            return {used, {}};
        }
        scanned_ = lf + 1;
        const std::size_t line_end = lf - 1;
        const bool empty = line_end == line_begin_;
        if (empty) {
            used += scanned_ - kept;
            head_.text.resize(scanned_);
            parse_head();
            return {used, {}};
        }
        if (!scan_line(line_begin_, line_end)) return {used, {}};
        line_begin_ = scanned_;
    }
    if (request_line_too_long(head_.text.size())) {
        // Told before the line's end, which may never come.
        refuse(414, "target_too_long", "the request target is too long");
    } else if (head_.text.size() >= limits_.head_max_bytes) {
        refuse(431, "head_too_large", "the request's headers are too large");
    }
    return {used + offered.size(), {}};
}

void Parser::parse_head() {
    llhttp_->begin(kind_);
    if (std::memchr(head_.text.data(), 0x7f, head_.text.size()) != nullptr) {
        malformed("a control character stands in the head");
        return;
    }
    const llhttp_errno_t verdict =
        llhttp_execute(&llhttp_->machine, head_.text.data(), head_.text.size());
    if (state_ == State::refused) return;
    if (verdict == HPE_PAUSED && llhttp_->message_done) {
        state_ = State::complete;
    } else if (verdict == HPE_OK && llhttp_->headers_done) {
        state_ = State::body;
    } else if (kind_ == Kind::request && verdict == HPE_INVALID_METHOD) {
        malformed("the method is unknown");
    } else if (verdict == HPE_OK || verdict == HPE_PAUSED) {
        malformed("the head is incomplete");
    } else {
        const char* reason = llhttp_get_error_reason(&llhttp_->machine);
        malformed(reason != nullptr && *reason != '\0' ? reason : "the head is malformed");
    }
}

void Parser::check_request() {
    const llhttp_t& m = llhttp_->machine;
    const std::string_view text = head_.text;
    head_.method = text.substr(0, text.find(' '));
    // llhttp knows RTSP and ICE as well, whose names for the version differ.
    const std::string_view line = text.substr(0, text.find('\r'));
    if (m.http_major != 1 || m.http_minor > 1 || line.substr(line.rfind(' ') + 1, 5) != "HTTP/") {
        return malformed("the version is not HTTP/1.1 or HTTP/1.0");
    }
    if (m.method == HTTP_CONNECT) return malformed("CONNECT is not served");
    if (!allowed_method(m.method)) {
        return refuse(501, "method_not_implemented", "the method is not implemented");
    }
    if (head_.target.empty() || head_.target.front() != '/') {
        return malformed("the request target must start with '/'");
    }
    if (head_.target.find('#') != std::string_view::npos) {
        return malformed("the request target has a fragment");
    }
    if (llhttp_->hosts > 1) return malformed("the request has more than one Host");
    if (llhttp_->hosts == 0 && m.http_minor == 1) return malformed("the request has no Host");
    if (!plain_host(llhttp_->host)) return malformed("the Host is malformed");
    if (llhttp_->codings > 0) {
        if (m.http_minor == 0) return malformed("HTTP/1.0 has no Transfer-Encoding");
        if (llhttp_->codings > 1)
            return malformed("the request has more than one Transfer-Encoding");
        if (llhttp_->coding.empty()) return malformed("Transfer-Encoding is empty");
        if (!name_is(llhttp_->coding, "chunked")) {
            return refuse(501, "coding_not_implemented",
                          "only the transfer coding \"chunked\" is implemented");
        }
    }
    if (head_.content_length.value_or(0) > kLengthMax) {
        return refuse(413, "body_too_large", "the Content-Length is too large");
    }
    if (llhttp_->upgrade && (m.flags & F_CONNECTION_UPGRADE) != 0) {
        return malformed("protocol upgrades are not served");
    }
    if (llhttp_->other_expectation) {
        return refuse(417, "expectation_failed", "only \"Expect: 100-continue\" is understood");
    }
    if (m.http_minor == 0) head_.expect_continue = false;  // RFC 9110 10.1.1
    head_.keep_alive = m.http_minor == 1 ? (m.flags & F_CONNECTION_CLOSE) == 0
                                         : (m.flags & F_CONNECTION_KEEP_ALIVE) != 0 &&
                                               (m.flags & F_CONNECTION_CLOSE) == 0;
}

void Parser::check_response() {
    const llhttp_t& m = llhttp_->machine;
    head_.status = m.status_code;
    if (head_.text.compare(0, 5, "HTTP/") != 0 || m.http_major != 1 || m.http_minor > 1) {
        return malformed("the version is not HTTP/1.1 or HTTP/1.0");
    }
    if (head_.status < 100 || head_.status > 599) return malformed("the status is not 100 to 599");
    if (head_.status == 101) return malformed("the protocol was switched without being asked");
    if (llhttp_->codings > 0) {
        if (llhttp_->codings > 1 || m.http_minor == 0 || !name_is(llhttp_->coding, "chunked")) {
            return malformed("the transfer coding is not exactly \"chunked\"");
        }
    }
    if (head_.content_length.value_or(0) > kLengthMax) {
        return malformed("the Content-Length is too large");
    }
    head_.bodyless =
        answers_head_ || head_.status < 200 || head_.status == 204 || head_.status == 304;
    head_.to_eof = !head_.bodyless && !head_.chunked && !head_.content_length;
    head_.keep_alive = !head_.to_eof && (m.flags & F_CONNECTION_CLOSE) == 0 &&
                       (m.http_minor == 1 || (m.flags & F_CONNECTION_KEEP_ALIVE) != 0);
}

Parser::Taken Parser::take_body(char* bytes, std::size_t size) {
    SEMEL_ASSERT(state_ == State::body, "take_body() outside of a body");
    if (size == 0) return {};
    Llhttp& l = *llhttp_;
    l.input = bytes;
    l.decoded = nullptr;
    l.decoded_size = 0;
    const llhttp_errno_t verdict = llhttp_execute(&l.machine, bytes, size);
    std::size_t taken = size;
    if (verdict == HPE_PAUSED && l.message_done) {
        taken = static_cast<std::size_t>(llhttp_get_error_pos(&l.machine) - bytes);
        state_ = State::complete;
    } else if (verdict != HPE_OK) {
        const char* reason = llhttp_get_error_reason(&l.machine);
        malformed(l.over_limit                           ? "the body's framing is over a limit"
                  : reason != nullptr && *reason != '\0' ? reason
                                                         : "the body's framing is malformed");
        return {};
    }
    l.taken_before += taken;
    if (l.framing_over_limit(l.taken_before)) {
        malformed("the body's framing is over a limit");
        return {};
    }
    return {taken, {l.decoded, l.decoded_size}};
}

bool Parser::finish() {
    if (state_ == State::body && head_.to_eof) state_ = State::complete;
    return state_ == State::complete;
}

}  // namespace semel::http
