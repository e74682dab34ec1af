#include "sim/fake_exchange.hpp"

#include <algorithm>

#include "base/assert.hpp"

namespace semel::sim {

using http::BodyPiece;
using http::BodyStatus;
using http::Task;

std::string Received::header(const std::string& name) const {
    const std::string wanted = "\r\n" + name + ": ";
    const std::string lines = "\r\n" + headers;
    const auto at = lines.find(wanted);
    if (at == std::string::npos) return {};
    const auto begin = at + wanted.size();
    return lines.substr(begin, lines.find("\r\n", begin) - begin);
}

FakeExchange::FakeExchange(runtime::Loop& loop, FakeRequest request)
    : loop_(loop), request_(std::move(request)) {
    head_.method = request_.method;
    head_.target = request_.target;
    const auto question = head_.target.find('?');
    head_.path = head_.target.substr(0, question);
    if (question != std::string_view::npos) head_.query = head_.target.substr(question + 1);
    for (const auto& [name, value] : request_.headers) head_.headers.push_back({name, value});
    if (!request_.body.empty()) head_.content_length = request_.body.size();
}

Task<BodyStatus> FakeExchange::read_body(std::string& into, std::uint64_t limit) {
    for (;;) {
        const BodyPiece piece = co_await read_some();
        if (piece.status != BodyStatus::ok) co_return piece.status;
        if (piece.bytes.empty()) co_return BodyStatus::ok;
        if (into.size() + piece.bytes.size() > limit) co_return BodyStatus::too_large;
        into.append(piece.bytes);
    }
}

Task<BodyPiece> FakeExchange::read_some() {
    if (client_gone()) co_return BodyPiece{BodyStatus::closed, {}};
    const std::string_view rest = std::string_view(request_.body).substr(body_read_);
    if (body_breaks && body_read_ > 0) co_return BodyPiece{BodyStatus::closed, {}};
    const std::string_view piece = rest.substr(0, body_piece_max);
    body_read_ += piece.size();
    co_return BodyPiece{BodyStatus::ok, piece};
}

Task<bool> FakeExchange::send(std::string bytes) {
    if (write_takes.count() != 0)
        co_await loop_.sleep_until(std::min(loop_.now() + write_takes, vanish_at));
    if (client_gone()) co_return false;
    if (received_.state == Received::State::nothing) {
        received_.state = Received::State::partial;
        received_.status = response_.status;
        received_.headers = response_.headers;
        received_.first_byte_at = loop_.now();
    }
    received_.body += bytes;
    co_return true;
}

Task<bool> FakeExchange::respond(const http::ResponseHead& head,
                                 std::span<const std::string_view> body) {
    SEMEL_ASSERT(!answered_ && !begun_, "a handler gives one answer");
    std::string whole;
    for (const std::string_view piece : body) whole += piece;
    response_ = head;
    received_.length = whole.size();
    answered_ = true;
    if (!co_await send(std::move(whole))) co_return false;
    received_.state = Received::State::finished;
    received_.ended_at = loop_.now();
    co_return true;
}

void FakeExchange::begin(const http::ResponseHead& head, std::optional<std::uint64_t> length) {
    SEMEL_ASSERT(!answered_ && !begun_, "a handler gives one answer");
    begun_ = true;
    response_ = head;
    received_.length = length;
}

Task<bool> FakeExchange::write(std::string_view bytes) {
    SEMEL_ASSERT(begun_ && !answered_, "write comes between begin and finish");
    co_return co_await send(std::string(bytes));
}

Task<bool> FakeExchange::finish(std::string_view last) {
    SEMEL_ASSERT(begun_ && !answered_, "finish comes once, after begin");
    answered_ = true;
    if (!co_await send(std::string(last))) co_return false;
    const bool short_body = received_.length && received_.body.size() != *received_.length;
    SEMEL_ASSERT(!short_body, "a body is as long as announced");
    received_.state = Received::State::finished;
    received_.ended_at = loop_.now();
    co_return true;
}

void FakeExchange::cut() {
    SEMEL_ASSERT(!answered_, "a finished answer cannot be cut");
    answered_ = true;
    if (client_gone()) return;
    received_.state = Received::State::cut;
    received_.ended_at = loop_.now();
}

}  // namespace semel::sim
