#include "brokers/rabbitmq/connection.hpp"

#include <amqp_framing.h>
#include <amqp_ssl_socket.h>
#include <amqp_tcp_socket.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cstdint>

namespace semel::brokers::rabbitmq {

namespace {

constexpr timeval kConnectWithin{.tv_sec = 5, .tv_usec = 0};
constexpr timeval kAnswerWithin{.tv_sec = 10, .tv_usec = 0};
constexpr timeval kCloseWithin{.tv_sec = 3, .tv_usec = 0};
const std::string kSystemAuthorities = "/etc/ssl/certs/ca-certificates.crt";
constexpr int kFrameMaxBytes = 131'072;

amqp_table_entry_t entry(const char* name, const char* text) {
    amqp_table_entry_t out{};
    out.key = amqp_cstring_bytes(name);
    out.value.kind = AMQP_FIELD_KIND_UTF8;
    out.value.value.bytes = amqp_cstring_bytes(text);
    return out;
}
amqp_table_entry_t entry(const char* name) {
    amqp_table_entry_t out{};
    out.key = amqp_cstring_bytes(name);
    out.value.kind = AMQP_FIELD_KIND_BOOLEAN;
    out.value.value.boolean = 1;
    return out;
}

void json_string(std::string& out, std::string_view text) {
    constexpr char kHex[] = "0123456789abcdef";
    out += '"';
    for (const char c : text) {
        const auto byte = static_cast<unsigned char>(c);
        if (c == '"' || c == '\\') {
            out += '\\';
            out += c;
        } else if (byte < 0x20) {
            out += "\\u00";
            out += kHex[byte >> 4];
            out += kHex[byte & 15];
        } else {
            out += c;
        }
    }
    out += '"';
}

void json(std::string& out, const amqp_field_value_t& value) {
    switch (value.kind) {
        case AMQP_FIELD_KIND_ARRAY:
            out += '[';
            for (int i = 0; i < value.value.array.num_entries; ++i) {
                if (i > 0) out += ',';
                json(out, value.value.array.entries[i]);
            }
            out += ']';
            return;
        case AMQP_FIELD_KIND_TABLE:
            out += '{';
            for (int i = 0; i < value.value.table.num_entries; ++i) {
                if (i > 0) out += ',';
                json_string(out, view(value.value.table.entries[i].key));
                out += ':';
                json(out, value.value.table.entries[i].value);
            }
            out += '}';
            return;
        case AMQP_FIELD_KIND_UTF8:
        case AMQP_FIELD_KIND_BYTES:
            return json_string(out, view(value.value.bytes));
        default:
            out += text_of(value).value_or("null");
    }
}

}  // namespace

std::optional<std::string> text_of(const amqp_field_value_t& value) {
    switch (value.kind) {
        case AMQP_FIELD_KIND_UTF8:
        case AMQP_FIELD_KIND_BYTES:
            return std::string(view(value.value.bytes));
        case AMQP_FIELD_KIND_BOOLEAN:
            return value.value.boolean != 0 ? "true" : "false";
        case AMQP_FIELD_KIND_I8:
            return std::to_string(value.value.i8);
        case AMQP_FIELD_KIND_U8:
            return std::to_string(value.value.u8);
        case AMQP_FIELD_KIND_I16:
            return std::to_string(value.value.i16);
        case AMQP_FIELD_KIND_U16:
            return std::to_string(value.value.u16);
        case AMQP_FIELD_KIND_I32:
            return std::to_string(value.value.i32);
        case AMQP_FIELD_KIND_U32:
            return std::to_string(value.value.u32);
        case AMQP_FIELD_KIND_I64:
            return std::to_string(value.value.i64);
        case AMQP_FIELD_KIND_U64:
        case AMQP_FIELD_KIND_TIMESTAMP:
            return std::to_string(value.value.u64);
        case AMQP_FIELD_KIND_F32:
            return std::to_string(value.value.f32);
        case AMQP_FIELD_KIND_F64:
            return std::to_string(value.value.f64);
        case AMQP_FIELD_KIND_TABLE:
        case AMQP_FIELD_KIND_ARRAY: {
            std::string out;
            json(out, value);
            return out;
        }
        default:  // void, and decimals, which nobody sends
            return std::nullopt;
    }
}

base::Error library_error(int status, const std::string& doing, base::Applied applied) {
    return {.code = base::ErrorCode::io,
            .applied = applied,
            .detail = "rabbitmq: " + doing + ": " + amqp_error_string2(status)};
}

base::Error reply_error(const amqp_rpc_reply_t& reply, const std::string& doing) {
    if (reply.reply_type == AMQP_RESPONSE_LIBRARY_EXCEPTION)
        return library_error(reply.library_error, doing);
    amqp_frame_t frame{};
    frame.frame_type = AMQP_FRAME_METHOD;
    frame.payload.method = reply.reply;
    if (auto said = Connection::closed_by(frame)) {
        said->detail = "rabbitmq: " + doing + ": " + said->detail;
        return *said;
    }
    return {.code = base::ErrorCode::io, .detail = "rabbitmq: " + doing + ": refused"};
}

Connection::Connection(Endpoint endpoint, std::string name, std::string ca_file,
                       std::chrono::seconds heartbeat)
    : endpoint_(std::move(endpoint)),
      connection_name_(std::move(name)),
      ca_file_(std::move(ca_file)),
      heartbeat_(heartbeat) {}

Connection::~Connection() { drop(); }

std::string Connection::name() const {
    return endpoint_.host + ":" + std::to_string(endpoint_.port) +
           (endpoint_.vhost.starts_with('/') ? "" : "/") + endpoint_.vhost;
}

std::optional<base::Error> Connection::open() {
    drop();
    state_ = amqp_new_connection();
    const auto failed = [this](base::Error error) {
        drop();
        return std::optional(std::move(error));
    };
    amqp_socket_t* socket = nullptr;
    if (endpoint_.tls) {
        socket = amqp_ssl_socket_new(state_);
        if (socket == nullptr) return failed(library_error(AMQP_STATUS_NO_MEMORY, "TLS"));
        amqp_ssl_socket_set_verify_peer(socket, 1);
        amqp_ssl_socket_set_verify_hostname(socket, 1);
        amqp_ssl_socket_set_ssl_versions(socket, AMQP_TLSv1_2, AMQP_TLSvLATEST);
        const std::string& ca = ca_file_.empty() ? kSystemAuthorities : ca_file_;
        if (const int status = amqp_ssl_socket_set_cacert(socket, ca.c_str());
            status != AMQP_STATUS_OK)
            return failed(library_error(status, "reading the certificates of authorities " + ca));
    } else {
        socket = amqp_tcp_socket_new(state_);
        if (socket == nullptr) return failed(library_error(AMQP_STATUS_NO_MEMORY, "a socket"));
    }
    amqp_set_handshake_timeout(state_, &kAnswerWithin);
    amqp_set_rpc_timeout(state_, &kAnswerWithin);
    if (const int status = amqp_socket_open_noblock(socket, endpoint_.host.c_str(), endpoint_.port,
                                                    &kConnectWithin);
        status != AMQP_STATUS_OK)
        return failed(library_error(status, "connecting to " + name()));
    // Besides the library's own: to be told when the broker takes no messages.
    std::array capabilities{entry("connection.blocked"), entry("consumer_cancel_notify"),
                            entry("publisher_confirms"), entry("basic.nack"),
                            entry("authentication_failure_close")};
    std::array properties{entry("connection_name", connection_name_.c_str()),
                          entry("product", "semel"), amqp_table_entry_t{}};
    properties[2].key = amqp_cstring_bytes("capabilities");
    properties[2].value.kind = AMQP_FIELD_KIND_TABLE;
    properties[2].value.value.table = {.num_entries = static_cast<int>(capabilities.size()),
                                       .entries = capabilities.data()};
    const amqp_table_t table{.num_entries = static_cast<int>(properties.size()),
                             .entries = properties.data()};
    const amqp_rpc_reply_t login = amqp_login_with_properties(
        state_, endpoint_.vhost.c_str(), 0, kFrameMaxBytes, static_cast<int>(heartbeat_.count()),
        &table, AMQP_SASL_METHOD_PLAIN, endpoint_.user.c_str(), endpoint_.password.c_str());
    if (login.reply_type != AMQP_RESPONSE_NORMAL)
        return failed(reply_error(login, "logging in at " + name() + " as " + endpoint_.user));
    amqp_channel_open(state_, work_channel);
    if (auto error = last_error("opening a channel")) return failed(std::move(*error));
    return std::nullopt;
}

void Connection::drop() {
    if (state_ != nullptr) amqp_destroy_connection(state_);
    state_ = nullptr;
}

void Connection::close() {
    if (state_ == nullptr) return;
    amqp_set_rpc_timeout(state_, &kCloseWithin);
    amqp_channel_close(state_, work_channel, AMQP_REPLY_SUCCESS);
    amqp_connection_close(state_, AMQP_REPLY_SUCCESS);
    drop();
}

int Connection::fd() const { return state_ == nullptr ? -1 : amqp_get_sockfd(state_); }

std::optional<base::Error> Connection::last_error(const std::string& doing) {
    const amqp_rpc_reply_t reply = amqp_get_rpc_reply(state_);
    if (reply.reply_type == AMQP_RESPONSE_NORMAL) return std::nullopt;
    return reply_error(reply, doing);
}

base::Result<std::optional<amqp_frame_t>> Connection::next_frame(bool keep) {
    if (!keep) amqp_maybe_release_buffers(state_);
    amqp_frame_t frame{};
    const timeval now{};
    const int status = amqp_simple_wait_frame_noblock(state_, &frame, &now);
    if (status == AMQP_STATUS_TIMEOUT) return std::optional<amqp_frame_t>{};
    if (status != AMQP_STATUS_OK) return library_error(status, "reading from " + name());
    return std::optional(frame);
}

std::optional<base::Error> Connection::closed_by(const amqp_frame_t& frame) {
    if (frame.frame_type != AMQP_FRAME_METHOD) return std::nullopt;
    const auto said = [](const auto* close) {
        return base::Error{.code = base::ErrorCode::io,
                           .detail = "the broker says " + std::to_string(close->reply_code) + " " +
                                     std::string(view(close->reply_text))};
    };
    switch (frame.payload.method.id) {
        case AMQP_CHANNEL_CLOSE_METHOD:
            return said(static_cast<const amqp_channel_close_t*>(frame.payload.method.decoded));
        case AMQP_CONNECTION_CLOSE_METHOD:
            return said(static_cast<const amqp_connection_close_t*>(frame.payload.method.decoded));
        default:
            return std::nullopt;
    }
}

Mailbox::Mailbox() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}
Mailbox::~Mailbox() { ::close(fd_); }

void Mailbox::post(std::function<void()> command) {
    {
        const std::lock_guard lock(mutex_);
        commands_.push_back(std::move(command));
    }
    wake();
}

void Mailbox::wake() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(fd_, &one, sizeof one);
}

void Mailbox::wait(int socket, std::chrono::milliseconds within) {
    std::array<pollfd, 2> waiting{{{.fd = fd_, .events = POLLIN, .revents = 0},
                                   {.fd = socket, .events = POLLIN, .revents = 0}}};
    ::poll(waiting.data(), socket < 0 ? 1 : 2, static_cast<int>(within.count()));
    std::uint64_t drained = 0;
    [[maybe_unused]] const auto got = ::read(fd_, &drained, sizeof drained);
    std::deque<std::function<void()>> now;
    {
        const std::lock_guard lock(mutex_);
        now.swap(commands_);
    }
    for (const auto& command : now) command();
}

}  // namespace semel::brokers::rabbitmq
