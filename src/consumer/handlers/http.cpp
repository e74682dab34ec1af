#include "consumer/handlers/http.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <unordered_set>
#include <utility>

#include "base/json_scan.hpp"

namespace semel::consumer {

using namespace std::chrono_literals;
using runtime::Task;

namespace {

constexpr std::string_view hex_digits = "0123456789ABCDEF";

/// Name, TCP and TLS together.
constexpr milliseconds connect_patience{10'000};
/// An answer whose head came in time has at least so long for its body: how much of the time-out
/// went into sending the request is not known.
constexpr milliseconds body_time_min{1000};

bool is_visible(char c) { return c > 0x20 && c < 0x7f; }
bool is_hex(char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}
/// A `%` here would be taken for the beginning of an encoded byte.
bool looks_encoded(std::string_view text, std::size_t at) {
    return text[at] == '%' && at + 2 < text.size() && is_hex(text[at + 1]) && is_hex(text[at + 2]);
}
/// RFC 9110 5.6.2.
bool is_name_char(char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos;
}

template <class Plain>
void append_encoded(std::string& out, std::string_view text, Plain plain) {
    bool all_plain = true;
    for (std::size_t i = 0; i < text.size() && all_plain; ++i)
        all_plain = plain(text[i]) && !looks_encoded(text, i);
    if (all_plain) {
        out += text;
        return;
    }
    for (const char c : text) {
        if (plain(c) && c != '%') {
            out += c;
        } else {
            out += '%';
            out += hex_digits[static_cast<unsigned char>(c) >> 4];
            out += hex_digits[static_cast<unsigned char>(c) & 15];
        }
    }
}

void append_value(std::string& out, std::string_view text, bool blanks) {
    if (blanks && !text.empty() && text.front() != ' ' && text.back() != ' ') {
        append_encoded(out, text, [](char c) { return is_visible(c) || c == ' '; });
    } else {
        append_encoded(out, text, is_visible);
    }
}

template <class Number>
void append_number(std::string& out, Number value) {
    std::array<char, 24> digits{};
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
    out.append(digits.data(), end);
}

/// Lines that may be left out, up to the limits.
class BoundedLines {
  public:
    explicit BoundedLines(std::string& out) : out_(out) {}
    /// `write` appends one line to the string it is given.
    template <class Write>
    void add(Write write) {
        const std::size_t before = out_.size();
        write(out_);
        out_ += "\r\n";
        const std::size_t bytes = out_.size() - before;
        if (lines_ == message_headers_max_lines || bytes > message_headers_max_bytes - bytes_) {
            out_.resize(before);
            cut_ = true;
            return;
        }
        ++lines_;
        bytes_ += bytes;
    }
    [[nodiscard]] bool cut() const { return cut_; }

  private:
    std::string& out_;
    std::size_t lines_ = 0;
    std::size_t bytes_ = 0;
    bool cut_ = false;
};

bool is_content_type(std::string_view text) {
    return !text.empty() && text.find('/') != std::string_view::npos && text.front() != ' ' &&
           text.back() != ' ' &&
           std::all_of(text.begin(), text.end(), [](char c) { return is_visible(c) || c == ' '; });
}

std::string_view content_type_of(const brokers::Delivery& delivery) {
    for (const brokers::Header& header : delivery.headers) {
        if (header.value && http::name_is(header.name, "content-type") &&
            is_content_type(*header.value))
            return *header.value;
    }
    if (delivery.properties && is_content_type(delivery.properties->content_type))
        return delivery.properties->content_type;
    // Frameworks parse what is declared as JSON, and most producers declare nothing.
    const std::string_view body = delivery.value.value_or(std::string_view{});
    const auto first = body.find_first_not_of(" \t\r\n");
    const auto last = body.find_last_not_of(" \t\r\n");
    const bool json =
        first != std::string_view::npos &&
        ((body[first] == '{' && body[last] == '}') || (body[first] == '[' && body[last] == ']'));
    return json ? "application/json" : "application/octet-stream";
}

std::optional<int> two_digits(std::string_view text, std::size_t at) {
    const auto digit = [&](std::size_t i) { return text[i] >= '0' && text[i] <= '9'; };
    if (!digit(at) || !digit(at + 1)) return std::nullopt;
    return (text[at] - '0') * 10 + (text[at + 1] - '0');
}

/// Unix time of an IMF-fixdate, the one form that is still sent: "Sun, 06 Nov 1994 08:49:37 GMT".
std::optional<std::int64_t> unix_time_of(std::string_view date) {
    constexpr std::string_view form = "ddd, 00 mmm 0000 00:00:00 GMT";
    if (date.size() != form.size() || !date.ends_with(" GMT") || date[3] != ',')
        return std::nullopt;
    constexpr std::string_view months = "JanFebMarAprMayJunJulAugSepOctNovDec";
    const auto month_at = months.find(date.substr(8, 3));
    const auto day = two_digits(date, 5), century = two_digits(date, 12),
               year_of = two_digits(date, 14), hour = two_digits(date, 17),
               minute = two_digits(date, 20), second = two_digits(date, 23);
    if (month_at == std::string_view::npos || month_at % 3 != 0 || !day || !century || !year_of ||
        !hour || !minute || !second)
        return std::nullopt;
    const std::chrono::year_month_day when{
        std::chrono::year{*century * 100 + *year_of},
        std::chrono::month{static_cast<unsigned>(month_at / 3 + 1)},
        std::chrono::day{static_cast<unsigned>(*day)}};
    if (!when.ok() || *hour > 23 || *minute > 59 || *second > 60) return std::nullopt;
    return std::chrono::seconds{std::chrono::sys_days{when}.time_since_epoch()}.count() +
           *hour * 3600 + *minute * 60 + *second;
}

/// What an answer says, apart from its body.
struct Said {
    int status = 0;
    std::string outcome;  ///< Semel-Outcome.
    milliseconds after{0};
    bool fatal_body = false;
};

HandlerOutcome outcome_of(const Said& said, const std::string& where) {
    const std::string answered = where + " answered " + std::to_string(said.status);
    if (http::name_is(said.outcome, "fatal")) return HandledFatal{answered + " (fatal)"};
    if (http::name_is(said.outcome, "not-yet"))
        return HandledNotYet{answered + " (not yet)", said.after};
    if (http::name_is(said.outcome, "retry"))
        return HandledFailed{answered + " (retry)", said.after};
    if (said.fatal_body) return HandledFatal{answered + " (fatal)"};
    if (said.status >= 200 && said.status <= 299) return Handled{};
    switch (said.status) {
        case 401:
        case 403:
        case 407:
            return HandlerIll{answered +
                              ": it does not let this consumer in; check its access "
                              "rules and the proxies before it"};
        case 404:
        case 405:
        case 410:
        case 421:
            return HandlerIll{answered +
                              ": it takes no messages there; check the handler's url and what is "
                              "deployed behind it"};
        case 409:
        case 423:
        case 425:
            return HandledNotYet{answered, said.after};
        case 408:
        case 429:
            return HandledFailed{answered, said.after};
        default:
            break;
    }
    if (said.status >= 300 && said.status <= 399) {
        return HandlerIll{answered +
                          ": redirects are not followed; set the handler's url to where it leads"};
    }
    if (said.status >= 400 && said.status <= 499) return HandledFatal{answered};
    return HandledFailed{answered, said.after};
}

HandlerOutcome outcome_of(const http::CallError& error, const std::string& where) {
    using Kind = http::CallError::Kind;
    if (error.maybe_processed) return HandledUnknown{where + ": " + error.detail};
    if (error.kind == Kind::refused || error.kind == Kind::connect_timeout) {
        return HandlerIll{where + " cannot be reached (" + error.detail +
                          "); start it or correct the handler's url"};
    }
    return HandlerIll{where + " was not asked (" + error.detail + ")"};
}

bool says_fatal(std::string_view body) {
    const auto members = base::top_level_members(body);
    const auto raw = members ? base::find_member(*members, "fatal") : std::nullopt;
    return raw && base::json_bool(*raw).value_or(false);
}

class HttpHandler final : public Handler {
  public:
    HttpHandler(runtime::Loop& loop, http::Client& client, http::Origin origin, std::string target,
                milliseconds timeout, HttpHandlerWays ways, std::string name)
        : state_(std::make_shared<State>(State{loop, client, std::move(origin), std::move(target),
                                               timeout, ways, std::move(name)})) {}

    void handle(const Message& message, const Attempt& attempt, Done done) override {
        state_->loop.spawn(run(state_, message, attempt, std::move(done)));
    }
    void cancel_all() override {
        for (Running* const one : state_->running) one->cancel();
    }
    [[nodiscard]] std::string name() const override { return state_->name; }

  private:
    struct Running {
        http::Client::CancelToken token;
        http::Response* response = nullptr;
        bool timed_out = false;

        void cancel() {
            token.cancel();
            if (response != nullptr) response->cancel();
        }
    };
    /// Outlives the handler while calls run.
    struct State {
        runtime::Loop& loop;
        http::Client& client;
        const http::Origin origin;
        const std::string target;
        const milliseconds timeout;
        const HttpHandlerWays ways;
        const std::string name;
        std::unordered_set<Running*> running{};
    };

    static Task<> run(std::shared_ptr<State> state, const Message& message, Attempt attempt,
                      Done done) {
        Running running;
        state->running.insert(&running);
        HandlerOutcome outcome = co_await call(*state, running, message, attempt);
        state->running.erase(&running);
        done(std::move(outcome));
    }

    static Task<HandlerOutcome> call(State& state, Running& running, const Message& message,
                                     Attempt attempt) {
        const base::SteadyTime began = state.loop.now();
        http::Request request{.method = "POST",
                              .target = state.target,
                              .headers = http_handler_headers(message, attempt),
                              .body = message.delivery.value.value_or(std::string_view{}),
                              .has_body = true};
        const http::Timeouts timeouts{
            .connect = connect_patience, .first_byte = state.timeout, .idle = state.timeout};
        auto answered = co_await state.client.call(state.origin, request, timeouts, &running.token);
        if (const auto* error = std::get_if<http::CallError>(&answered);
            error != nullptr && error->on_kept && state.ways.repeats_on_new_connection) {
            request.own_connection = true;
            answered = co_await state.client.call(state.origin, std::move(request), timeouts,
                                                  &running.token);
        }
        if (const auto* error = std::get_if<http::CallError>(&answered))
            co_return outcome_of(*error, state.name);
        const std::unique_ptr<http::Response> response =
            std::get<std::unique_ptr<http::Response>>(std::move(answered));
        Said said{.status = response->status(),
                  .outcome = std::string(response->header("semel-outcome").value_or("")),
                  .after = retry_after_of(response->header("retry-after").value_or(""),
                                          state.loop.clock().wall_us())};
        const bool success = said.status >= 200 && said.status <= 299;
        auto answer = std::make_shared<HandlerAnswer>();
        answer->content_type = std::string(response->header("content-type").value_or(""));
        const bool json =
            response->header("content-type").value_or("").find("json") != std::string_view::npos;
        const base::SteadyTime now = state.loop.now();
        const base::SteadyTime until =
            std::max(began + state.timeout, now + std::min(state.timeout, body_time_min));
        running.response = response.get();
        const runtime::TimerId timer = state.loop.at(until, [&running] {
            running.timed_out = true;
            running.response->cancel();
        });
        const std::size_t limit = success ? handled_body_max_bytes : refusal_body_max_bytes;
        std::string kept;
        std::size_t seen = 0;
        std::optional<http::CallError> broken;
        while (seen <= limit) {
            const auto read = co_await response->read_some();
            if (const auto* error = std::get_if<http::CallError>(&read)) {
                broken = *error;
                break;
            }
            const std::string_view piece = std::get<std::string_view>(read);
            if (piece.empty()) break;
            seen += piece.size();
            if (!success && json) kept += piece;
            // Of one that is too large, enough to see that it is.
            if (success && state.ways.answers && answer->body.size() <= answer_max_bytes)
                answer->body += piece;
        }
        state.loop.cancel(timer);
        running.response = nullptr;
        if (success && broken) {
            // It said "done" before it was: work behind a streamed answer may have been cut off.
            co_return HandledUnknown{state.name + " answered " + std::to_string(said.status) +
                                     (running.timed_out
                                          ? " and did not end its answer within " +
                                                std::to_string(state.timeout.count()) + " ms"
                                          : " and its answer broke off (" + broken->detail + ")")};
        }
        said.fatal_body = !success && seen <= limit && says_fatal(kept);
        HandlerOutcome outcome = outcome_of(said, state.name);
        if (auto* handled = std::get_if<Handled>(&outcome);
            handled != nullptr && !answer->body.empty())
            handled->answer = std::move(answer);
        co_return outcome;
    }

    std::shared_ptr<State> state_;
};

}  // namespace

std::string header_value_of(std::string_view text, bool blanks) {
    std::string out;
    append_value(out, text, blanks);
    return out;
}

milliseconds retry_after_of(std::string_view value, std::int64_t now_us) {
    if (value.empty()) return 0ms;
    std::int64_t seconds = 0;
    const auto [end, ec] = std::from_chars(value.data(), value.data() + value.size(), seconds);
    if (end == value.data() + value.size() && value.front() != '-') {
        // A number too long to read is a wait too long to wait.
        if (ec == std::errc::result_out_of_range) return retry_after_max;
        return std::min<milliseconds>(
            retry_after_max, std::chrono::seconds{std::min<std::int64_t>(seconds, 86'400)});
    }
    const auto when = unix_time_of(value);
    if (!when) return 0ms;
    const auto left = milliseconds{*when * 1000 - now_us / 1000};
    return std::clamp<milliseconds>(left, 0ms, retry_after_max);
}

std::string http_handler_headers(const Message& message, const Attempt& attempt) {
    const brokers::Delivery& delivery = message.delivery;
    std::string out;
    out.reserve(768);
    if (delivery.value) {
        out += "Content-Type: ";
        out += content_type_of(delivery);
        out += "\r\n";
    } else {
        out += "Semel-Tombstone: true\r\n";
    }
    out += "Idempotency-Key: ";
    append_value(out, message.id, false);
    out += "\r\nSemel-Attempt: ";
    append_number(out, attempt.number);
    out += "\r\nSemel-Fencing-Token: ";
    append_number(out, attempt.token.value);
    out += "\r\nSemel-Topic: ";
    // Of a delayed copy: what its first delivery said.
    const brokers::Position where = message.copy_of.value_or(
        brokers::Position{.partition = delivery.partition(), .offset = delivery.position()});
    append_value(out, where.partition.topic, false);
    out += "\r\n";
    if (!delivery.properties) {  // a delivery tag of RabbitMQ says nothing to anybody else
        out += "Semel-Partition: ";
        append_number(out, where.partition.number);
        out += "\r\nSemel-Offset: ";
        append_number(out, where.offset);
        out += "\r\n";
    }
    BoundedLines lines(out);
    if (delivery.key) {
        lines.add([&](std::string& to) {
            to += "Semel-Key: ";
            append_value(to, *delivery.key, true);
        });
    }
    for (const brokers::Header& header : delivery.headers) {
        const std::string_view value = header.value.value_or(std::string_view{});
        if (http::name_is(header.name, "content-type")) continue;
        const bool trace =
            http::name_is(header.name, "traceparent") || http::name_is(header.name, "tracestate");
        lines.add([&](std::string& to) {
            if (!trace) to += "Semel-Header-";
            append_encoded(to, header.name, is_name_char);
            to += ": ";
            append_value(to, value, true);
        });
    }
    if (lines.cut()) out += "Semel-Headers-Cut: true\r\n";
    return out;
}

base::Result<std::unique_ptr<Handler>> make_http_handler(runtime::Loop& loop, http::Client& client,
                                                         config::HttpHandlerConfig config,
                                                         HttpHandlerWays ways) {
    // Path and query are sent as they are written: a service may tell /orders/ from /orders.
    const auto scheme_end = config.url.find("://");
    const auto path_at = scheme_end == std::string::npos
                             ? scheme_end
                             : config.url.find_first_of("/?#", scheme_end + 3);
    std::string target = path_at == std::string::npos ? std::string{} : config.url.substr(path_at);
    auto origin = http::parse_origin(std::string_view(config.url).substr(0, path_at));
    if (!origin) return origin.error();
    if (target.empty() || target.front() != '/') target.insert(0, "/");
    const bool sendable =
        std::all_of(target.begin(), target.end(), [](char c) { return is_visible(c) && c != '#'; });
    const std::string where = (origin->tls ? "https://" : "http://") + origin->authority +
                              target.substr(0, target.find('?'));
    if (!sendable) {
        return base::Error{.code = base::ErrorCode::invalid_argument,
                           .detail = "the url of the http handler at " + origin->authority +
                                     " has a '#', a blank, a control or a non-ASCII character; "
                                     "write it percent-encoded"};
    }
    return std::unique_ptr<Handler>(std::make_unique<HttpHandler>(
        loop, client, std::move(*origin), std::move(target), config.timeout, ways, where));
}

}  // namespace semel::consumer
