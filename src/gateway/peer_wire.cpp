#include "gateway/peer_wire.hpp"

#include <algorithm>
#include <charconv>
#include <limits>

#include "base/assert.hpp"

namespace semel::gateway {

namespace {

constexpr std::string_view path_prefix = "/flights/";
constexpr std::string_view token_query = "?token=";
constexpr std::string_view from_query = "&from=";

constexpr char kind_hello = 'H';
constexpr char kind_head = 'A';
constexpr char kind_data = 'D';
constexpr char kind_last = 'L';
constexpr char kind_ping = 'P';
constexpr char kind_end = 'E';

constexpr std::uint8_t flag_streaming = 1;
constexpr std::uint8_t flag_from_gateway = 2;
constexpr std::uint8_t flag_takeover = 4;
constexpr std::uint8_t flag_length = 8;
constexpr std::uint8_t flag_pending = 1;

/// Status, flags, attempt, and the length of the content type.
constexpr std::size_t head_fixed_bytes = 2 + 1 + 4 + 2;
constexpr std::size_t head_max_bytes =
    head_fixed_bytes + 8 + peer_content_type_max_bytes + peer_headers_max_bytes;
constexpr std::size_t hello_bytes = 1 + sizeof(base::Digest::bytes);
constexpr std::size_t end_bytes = 2 + 8;

template <class Unsigned>
void put(std::string& out, Unsigned value) {
    for (std::size_t i = sizeof(Unsigned); i-- > 0;)
        out += static_cast<char>(static_cast<std::uint8_t>(value >> (8 * i)));
}

/// The caller has checked that the bytes are there.
template <class Unsigned>
Unsigned take(std::string_view& from) {
    Unsigned value = 0;
    for (std::size_t i = 0; i < sizeof(Unsigned); ++i)
        value = static_cast<Unsigned>((value << 8) | static_cast<std::uint8_t>(from[i]));
    from.remove_prefix(sizeof(Unsigned));
    return value;
}

bool is_token_char(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos;
}

bool is_value(std::string_view text) {
    return std::all_of(text.begin(), text.end(), [](char c) {
        return c == '\t' || (static_cast<std::uint8_t>(c) >= 0x20 && c != 0x7F);
    });
}

/// "Name: value\r\n", any number of them.
bool are_header_lines(std::string_view lines) {
    while (!lines.empty()) {
        const std::size_t end = lines.find("\r\n");
        if (end == std::string_view::npos) return false;
        const std::string_view line = lines.substr(0, end);
        const std::size_t colon = line.find(": ");
        if (colon == std::string_view::npos || colon == 0) return false;
        const std::string_view name = line.substr(0, colon);
        if (!std::all_of(name.begin(), name.end(), is_token_char)) return false;
        if (!is_value(line.substr(colon + 2))) return false;
        lines.remove_prefix(end + 2);
    }
    return true;
}

std::optional<std::uint64_t> decimal(std::string_view text) {
    std::uint64_t value = 0;
    const auto [after, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (text.empty() || error != std::errc() || after != text.data() + text.size())
        return std::nullopt;
    return value;
}

std::size_t payload_max(char kind) {
    switch (kind) {
        case kind_hello:
            return hello_bytes;
        case kind_head:
            return head_max_bytes;
        case kind_data:
        case kind_last:
            return peer_data_max_bytes;
        case kind_end:
            return end_bytes;
        default:
            return 0;
    }
}

}  // namespace

std::string peer_target(const PeerQuestion& question) {
    std::string target(path_prefix);
    target += base::base64url(question.key.view());
    target.append(token_query).append(std::to_string(question.token.value));
    if (question.from != 0) target.append(from_query).append(std::to_string(question.from));
    return target;
}

std::optional<PeerQuestion> parse_peer_target(std::string_view target) {
    if (!target.starts_with(path_prefix)) return std::nullopt;
    target.remove_prefix(path_prefix.size());
    const std::size_t query = target.find(token_query);
    if (query == std::string_view::npos) return std::nullopt;
    PeerQuestion question;
    if (!base::digest_from_base64url(target.substr(0, query), question.key)) return std::nullopt;
    std::string_view token = target.substr(query + token_query.size());
    if (const std::size_t from = token.find(from_query); from != std::string_view::npos) {
        const auto offset = decimal(token.substr(from + from_query.size()));
        if (!offset) return std::nullopt;
        question.from = *offset;
        token = token.substr(0, from);
    }
    const auto value = decimal(token);
    if (!value) return std::nullopt;
    question.token = {*value};
    return question;
}

std::string peer_proof(const base::Hmac& secret, std::string_view target, std::string_view nonce) {
    std::string text = "semel-peer question\nGET\n";
    text.append(target).append("\n").append(nonce);
    return base::base64url(secret(text).view());
}

base::Digest peer_answer_proof(const base::Hmac& secret, std::string_view nonce) {
    std::string text = "semel-peer answer\n";
    text.append(nonce);
    return secret(text);
}

// ---------------------------------------------------------------- writing

void write_frame(std::string& out, const PeerFrame& frame) {
    const std::size_t begin = out.size();
    out.append(peer_frame_head_bytes, '\0');
    char kind = kind_ping;
    if (const auto* hello = std::get_if<PeerHello>(&frame)) {
        kind = kind_hello;
        put(out, peer_wire_version);
        out += hello->proof.view();
    } else if (const auto* head = std::get_if<PeerHead>(&frame)) {
        kind = kind_head;
        put(out, static_cast<std::uint16_t>(head->status));
        put(out, static_cast<std::uint8_t>((head->streaming ? flag_streaming : 0) |
                                           (head->from_gateway ? flag_from_gateway : 0) |
                                           (head->takeover ? flag_takeover : 0) |
                                           (head->content_length ? flag_length : 0)));
        put(out, head->attempt);
        if (head->content_length) put(out, *head->content_length);
        put(out, static_cast<std::uint16_t>(head->content_type.size()));
        out += head->content_type;
        out += head->kept_headers;
    } else if (const auto* data = std::get_if<PeerData>(&frame)) {
        kind = data->last ? kind_last : kind_data;
        out += data->bytes;
    } else if (const auto* end = std::get_if<PeerEnd>(&frame)) {
        kind = kind_end;
        put(out, static_cast<std::uint8_t>(end->how));
        put(out, static_cast<std::uint8_t>(end->record_pending ? flag_pending : 0));
        put(out, static_cast<std::uint64_t>(end->expires.us));
    }
    const std::size_t size = out.size() - begin - peer_frame_head_bytes;
    SEMEL_ASSERT(size <= payload_max(kind), "a frame is written within the reader's limits");
    out[begin] = kind;
    for (std::size_t i = 0; i < 4; ++i)
        out[begin + 1 + i] = static_cast<char>(static_cast<std::uint8_t>(size >> (8 * (3 - i))));
}

// ---------------------------------------------------------------- reading

void PeerReader::feed(std::string_view bytes) {
    if (state_ == State::refused) return;
    if (state_ == State::ended) {
        if (!bytes.empty()) refuse("bytes after the end");
        return;
    }
    pending_.erase(0, read_);
    read_ = 0;
    pending_ += bytes;
}

std::optional<PeerFrame> PeerReader::refuse(std::string_view why) {
    state_ = State::refused;
    refusal_ = why;
    pending_.clear();
    read_ = 0;
    return std::nullopt;
}

std::optional<PeerFrame> PeerReader::next() {
    if (state_ != State::open) return std::nullopt;
    std::string_view bytes = std::string_view(pending_).substr(read_);
    if (bytes.size() < peer_frame_head_bytes) return std::nullopt;
    const char kind = bytes.front();
    bytes.remove_prefix(1);
    const auto size = take<std::uint32_t>(bytes);
    if (std::string_view("HADLPE").find(kind) == std::string_view::npos)
        return refuse("a frame of an unknown kind");
    // Before anything is waited for: a wrong length must not make us hold what follows it.
    if (size > payload_max(kind)) return refuse("a frame that is too long");
    if (bytes.size() < size) return std::nullopt;
    read_ += peer_frame_head_bytes + size;
    auto frame = decode(kind, bytes.substr(0, size));
    if (frame && std::holds_alternative<PeerEnd>(*frame)) {
        if (read_ != pending_.size()) return refuse("bytes after the end");
        state_ = State::ended;
    }
    return frame;
}

std::optional<PeerFrame> PeerReader::decode(char kind, std::string_view payload) {
    if ((kind == kind_hello) == hello_) return refuse("a hello that is not the first frame");
    switch (kind) {
        case kind_hello: {
            if (payload.size() != hello_bytes) return refuse("a hello of the wrong length");
            if (take<std::uint8_t>(payload) != peer_wire_version)
                return refuse("another version of the peer protocol");
            hello_ = true;
            PeerHello hello;
            std::copy(payload.begin(), payload.end(), hello.proof.bytes.begin());
            return hello;
        }
        case kind_head: {
            if (head_) return refuse("a second head");
            if (payload.size() < head_fixed_bytes) return refuse("a head that is too short");
            PeerHead head;
            head.status = take<std::uint16_t>(payload);
            if (head.status < 200 || head.status > 599) return refuse("a head without a status");
            const auto flags = take<std::uint8_t>(payload);
            if (flags > (flag_streaming | flag_from_gateway | flag_takeover | flag_length))
                return refuse("a head with unknown flags");
            head.streaming = (flags & flag_streaming) != 0;
            head.from_gateway = (flags & flag_from_gateway) != 0;
            head.takeover = (flags & flag_takeover) != 0;
            head.attempt = take<std::uint32_t>(payload);
            if (head.attempt == 0) return refuse("a head without an attempt");
            if ((flags & flag_length) != 0) {
                if (payload.size() < 8 + 2) return refuse("a head that is too short");
                head.content_length = take<std::uint64_t>(payload);
            }
            const auto type_bytes = take<std::uint16_t>(payload);
            if (type_bytes > peer_content_type_max_bytes || type_bytes > payload.size())
                return refuse("a head whose content type is too long");
            head.content_type = payload.substr(0, type_bytes);
            head.kept_headers = payload.substr(type_bytes);
            if (head.kept_headers.size() > peer_headers_max_bytes)
                return refuse("a head whose headers are too long");
            if (!is_value(head.content_type) || !are_header_lines(head.kept_headers))
                return refuse("a head whose headers are none");
            head_ = true;
            return head;
        }
        case kind_data:
        case kind_last:
            if (!head_) return refuse("data before a head");
            if (payload.empty()) return refuse("an empty data frame");
            if (kind == kind_data && last_) return refuse("data after the last bytes");
            last_ = kind == kind_last;
            return PeerData{.bytes = payload, .last = last_};
        case kind_ping:
            return PeerPing{};
        default:
            break;
    }
    if (payload.size() != end_bytes) return refuse("an end of the wrong length");
    PeerEnd end;
    const auto how = take<std::uint8_t>(payload);
    if (how < static_cast<std::uint8_t>(PeerEnd::How::whole) ||
        how > static_cast<std::uint8_t>(PeerEnd::How::gone))
        return refuse("an end of an unknown kind");
    end.how = static_cast<PeerEnd::How>(how);
    const auto flags = take<std::uint8_t>(payload);
    if (flags > flag_pending) return refuse("an end with unknown flags");
    end.record_pending = (flags & flag_pending) != 0;
    const auto expires = take<std::uint64_t>(payload);
    if (expires > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
        return refuse("an end whose expiry is no time");
    end.expires = {static_cast<std::int64_t>(expires)};
    const bool needs_head = end.how == PeerEnd::How::whole || end.how == PeerEnd::How::cut;
    if (needs_head && !head_) return refuse("an end without a head");
    return end;
}

}  // namespace semel::gateway
