#include "gateway/owner.hpp"

#include <algorithm>

#include "base/assert.hpp"
#include "base/fault_point.hpp"
#include "http/sse.hpp"

namespace semel::gateway {

using namespace std::chrono_literals;

namespace {

/// Bodies of answers that are no success; a larger one is not passed on.
constexpr std::size_t failure_body_max_bytes = 4 * 1024 * 1024;
/// Bytes of a stream held back because no event has ended yet; beyond, they pass unjudged.
constexpr std::size_t held_event_max_bytes = http::SseScanner::kEventMaxBytes;
/// After the terminal event the upstream may take this long to end its body, so that the connection
/// can be kept.
constexpr auto end_after_terminal = 250ms;
/// How often an owner looks whether anybody still follows.
constexpr auto followers_look = 250ms;
/// Between two tries to write a chunk of a big answer while the store is down.
constexpr auto chunk_retry = 500ms;

bool is_event_stream(std::string_view content_type) {
    constexpr std::string_view type = "text/event-stream";
    return content_type.size() >= type.size() &&
           http::name_is(content_type.substr(0, type.size()), type);
}

bool deterministic_refusal(int status) {
    return status == 400 || status == 404 || status == 413 || status == 415 || status == 422;
}

bool provably_free(int status) { return status < 500 || status == 503 || status == 529; }

std::string status_text(int status) { return "the upstream answered " + std::to_string(status); }

Problem call_problem(const http::CallError& error) {
    using Kind = http::CallError::Kind;
    Problem problem{.status = 502, .slug = "upstream-failed", .state = "FAILED"};
    switch (error.kind) {
        case Kind::refused:
            problem.slug = "upstream-unreachable";
            problem.detail = "The upstream could not be reached (" + error.detail +
                             "); nothing was sent to it. Try again.";
            problem.retry_after_s = 1;
            break;
        case Kind::connect_timeout:
            problem.slug = "upstream-unreachable";
            problem.detail = "The connection to the upstream took too long (" + error.detail +
                             "); nothing was sent. Try again.";
            problem.retry_after_s = 1;
            break;
        case Kind::first_byte_timeout:
            problem.status = 504;
            problem.slug = "upstream-timeout";
            problem.detail =
                "The upstream did not begin its answer in time. It may have processed the request; "
                "submit again with the same id.";
            break;
        case Kind::idle_timeout:
            problem.status = 504;
            problem.slug = "upstream-timeout";
            problem.detail =
                "The upstream stopped in the middle of its answer. Submit again with the same id.";
            break;
        case Kind::reset:
            problem.detail = "The connection to the upstream broke (" + error.detail +
                             "). It may have processed the request; submit again with the same id.";
            problem.retry_after_s = 1;
            break;
        case Kind::cut:
            problem.slug = "upstream-cut";
            problem.detail = "The upstream's answer ended short. Submit again with the same id.";
            problem.retry_after_s = 1;
            break;
        case Kind::bad_response:
            problem.slug = "upstream-nonsense";
            problem.detail =
                "What the upstream sent is not a valid HTTP answer (" + error.detail + ").";
            break;
        case Kind::body_source:
            problem.status = 400;
            problem.slug = "body-broken";
            problem.detail = "The request's body ended early.";
            break;
        case Kind::cancelled:
            problem.slug = "call-cancelled";
            problem.detail =
                "The call was given up before its answer was complete. Submit again with the same "
                "id.";
            break;
    }
    return problem;
}

std::string_view failure_code(http::CallError::Kind kind) {
    using Kind = http::CallError::Kind;
    switch (kind) {
        case Kind::refused:
            return "upstream-unreachable";
        case Kind::connect_timeout:
            return "upstream-unreachable";
        case Kind::reset:
            return "upstream-reset";
        case Kind::first_byte_timeout:
            return "upstream-timeout";
        case Kind::idle_timeout:
            return "upstream-stalled";
        case Kind::cut:
            return "upstream-cut";
        case Kind::bad_response:
            return "upstream-nonsense";
        case Kind::body_source:
            return "body-broken";
        case Kind::cancelled:
            return "call-cancelled";
    }
    return "upstream-failed";
}

}  // namespace

core::Policy policy_of(const config::RouteConfig& route, const config::EngineConfig& engine) {
    core::Policy policy;
    policy.kind = core::IntentKind::http;
    policy.on_unknown = route.on_unknown == config::OnUnknown::hold ? core::OnUnknown::hold
                                                                    : core::OnUnknown::rerun;
    policy.on_failed = route.on_failed == config::OnFailed::replay ? core::OnFailed::replay
                                                                   : core::OnFailed::rerun;
    policy.max_attempts = route.max_paid_attempts;
    policy.retention_completed = engine.retention_completed;
    policy.retention_failed = engine.retention_failed;
    return policy;
}

Problem store_problem(const base::Error& error) {
    Problem problem{
        .status = 503, .slug = "store-unavailable", .retry_after_s = 1, .should_retry = true};
    if (error.code == base::ErrorCode::store_full) {
        problem.detail =
            "The store is full, so nothing new can be protected; the upstream was not "
            "called. Try again.";
        problem.retry_after_s = 5;
    } else if (error.code == base::ErrorCode::stopping) {
        problem.detail = "The gateway is shutting down; the upstream was not called. Try again.";
    } else {
        problem.detail =
            "The store cannot be asked at the moment, so the upstream was not called. Try again.";
    }
    return problem;
}

/// One grant while it is worked on. Lives in run()'s frame; timers and callbacks that point to it
/// end before it does.
struct Owner::Attempt {
    Attempt(Owner& owner_, FlightPtr flight_, Call& call_,
            std::unique_ptr<engine::LeaseGuard> lease_)
        : owner(owner_),
          loop(owner_.engine_.loop()),
          flight(std::move(flight_)),
          call(call_),
          lease(std::move(lease_)) {
        lease->on_overtaken = [this] { stop("overtaken"); };
        look();
    }
    ~Attempt() {
        lease->on_overtaken = nullptr;
        loop.cancel(timer);
    }
    Attempt(const Attempt&) = delete;
    Attempt& operator=(const Attempt&) = delete;

    void stop(std::string why) {
        if (!stopped.empty() || answered_upstream) return;
        stopped = std::move(why);
        if (!lease->overtaken()) owner.state_.metrics.abandoned_calls.add();
        cancel.cancel();
        if (response != nullptr) response->cancel();
    }

    void look() {
        timer = loop.at(loop.now() + followers_look, [this] {
            if (flight->followers() == 0) {
                if (call.route->on_disconnect == config::OnDisconnect::cancel) {
                    stop("client-disconnected");
                } else if (loop.now() - flight->left_at() >= call.route->finish_limit) {
                    stop("finish-limit");
                }
            }
            look();
        });
    }

    Owner& owner;
    Loop& loop;  // by itself: a destroyed loop's coroutines may outlive the engine
    FlightPtr flight;
    Call& call;
    std::unique_ptr<engine::LeaseGuard> lease;
    http::Client::CancelToken cancel;
    http::Response* response = nullptr;
    std::string
        held_back;  ///< Of a stream that failed: leaves after the record, as a terminal event does.
    std::string stopped;             ///< Why the call was given up by us.
    bool answered_upstream = false;  ///< All of the answer is here.
    runtime::TimerId timer = 0;

    std::vector<std::pair<std::string, std::string>> kept;
    std::vector<std::string> upstream_ids;
    int status = 200;
    bool stream = false;
    bool not_kept = false;
    std::uint32_t chunks_written = 0;
    bool chunks_waiting = false;  ///< A chunk could not be written; tried again at the end.
    base::Sha256 chunk_digest;
    bool told = false;  ///< The followers know how it ended.

    void tell(Journal::End end, std::string_view last, bool pending = false,
              core::StoreTime expires = {}) {
        if (told) return;
        told = true;
        owner.state_.flights.leave(call.key, flight);
        flight->journal().finish(end, last, pending, expires);
        flight->done();
    }
    void tell_moved_on() {
        if (told) return;
        told = true;
        owner.state_.flights.leave(call.key, flight);
        flight->journal().finish(Journal::End::cut, {});
        flight->move_on();
    }
    [[nodiscard]] core::Usage usage() const {
        core::Usage usage = call.shape->usage();
        usage.upstream_ids = upstream_ids;
        return usage;
    }
};

Task<> Owner::run(FlightPtr flight, Call& call) {
    if (call.runs_elsewhere) co_return co_await follow_elsewhere(std::move(flight), call);
    if (call.refused) {
        // What cannot be called takes no id: only if there is a record already, it is asked what it
        // says.
        const auto known = co_await engine_.get(call.key);
        if (!known || !*known) {
            state_.flights.leave(call.key, flight);
            flight->break_off(known ? std::move(*call.refused) : store_problem(known.error()));
            co_return;
        }
    }
    auto lease = co_await admit(flight, call);
    if (!lease) co_return;
    const RunningCall running(state_);
    const core::Granted granted = lease->granted();
    if (call.look_only) {
        co_await engine_.release(*lease);
        state_.flights.leave(call.key, flight);
        flight->move_on();
        co_return;
    }
    if (call.refused) {
        state_.flights.leave(call.key, flight);
        flight->break_off(std::move(*call.refused));
        co_await engine_.release(*lease);
        co_return;
    }
    if (granted.possible_second_payment) state_.metrics.paid_maybe_twice.add();
    call.shape->set_attempt(granted.attempt);
    if (call.route->on_unknown == config::OnUnknown::hold) {
        auto started = co_await engine_.start(*lease);
        if (!started) {
            // Whether `start` was written is not known; the call was not made, and failing it says
            // so.
            state_.flights.leave(call.key, flight);
            flight->break_off(store_problem(started.error()));
            co_await engine_.fail(*lease, {.certainty = core::Certainty::not_processed,
                                           .failure = {.code = "store-unavailable",
                                                       .message = "the call was not started"}});
            co_return;
        }
        if (!*started) {
            state_.flights.leave(call.key, flight);
            flight->move_on();
            co_return;
        }
    }
    flight->granted(granted);
    Attempt attempt(*this, flight, call, std::move(lease));
    co_await call_upstream(attempt);
    SEMEL_ASSERT(attempt.told, "every attempt tells its followers how it ended");
}

Task<> Owner::call_upstream(Attempt& attempt) {
    Call& call = attempt.call;
    const SteadyTime asked = engine_.loop().now();
    http::Request request{.method = call.method,
                          .target = call.target,
                          .headers = call.headers,
                          .body = call.sent_body(),
                          .has_body = true};
    base::fault_point("gateway.call.before");
    auto answer = co_await client_.call(call.upstream->origin, std::move(request),
                                        call.upstream->timeouts, &attempt.cancel);
    base::fault_point("gateway.call.sent");
    call.own_body.clear();
    call.own_body.shrink_to_fit();
    call.body.reset();  // the request is out: its bytes count no longer
    if (const auto* error = std::get_if<http::CallError>(&answer)) {
        co_await call_failed(attempt, *error);
        co_return;
    }
    const std::unique_ptr<http::Response> response =
        std::get<std::unique_ptr<http::Response>>(std::move(answer));
    state_.metrics.first_byte_seconds.observe(engine_.loop().now() - asked);
    attempt.response = response.get();
    SortedHeaders sorted = sort_headers(response->headers());
    attempt.status = response->status();
    attempt.upstream_ids = std::move(sorted.upstream_ids);
    AnswerHead head;
    head.status = response->status();
    head.content_type = std::move(sorted.content_type);
    head.live_headers = std::move(sorted.live_lines);
    if (!sorted.content_encoding.empty())
        sorted.kept.emplace_back("Content-Encoding", sorted.content_encoding);
    attempt.kept = std::move(sorted.kept);
    head.kept_headers = lines_of(attempt.kept);
    const bool coded = !sorted.content_encoding.empty();
    if (head.status < 200 || head.status > 299) {
        co_await take_failure(attempt, *response, std::move(head));
    } else if (is_event_stream(head.content_type) && !coded) {
        co_await pump_stream(attempt, *response, std::move(head));
    } else {
        // Asked for identity and got a coding: it passes as it is, and is not kept, since not every
        // duplicate could read it.
        attempt.not_kept = coded;
        if (coded) state_.metrics.unprotected(telemetry::Unprotected::encoding).add();
        co_await pump_plain(attempt, *response, std::move(head));
    }
    attempt.response = nullptr;
    state_.metrics.upstream_seconds.observe(engine_.loop().now() - asked);
}

Task<> Owner::pump_plain(Attempt& attempt, http::Response& response, AnswerHead head) {
    Journal& journal = attempt.flight->journal();
    AnswerShape& shape = *attempt.call.shape;
    std::string body;
    bool passing = false;
    const auto pass = [&] {
        passing = true;
        attempt.not_kept = true;
        state_.metrics.answers_not_kept.add();
        head.content_length = response.content_length();
        journal.set_head(head, true);
    };
    if (attempt.not_kept && shape.passes_unread()) pass();
    for (;;) {
        auto read = co_await response.read_some();
        if (const auto* error = std::get_if<http::CallError>(&read)) {
            co_await call_failed(attempt, *error);
            co_return;
        }
        const std::string_view piece = std::get<std::string_view>(read);
        if (piece.empty()) break;
        if (!passing &&
            (body.size() + piece.size() > state_.config.record_max_bytes || attempt.not_kept)) {
            if (!shape.passes_unread()) {
                response.cancel();
                const Problem problem{.status = 502,
                                      .slug = "answer-not-usable",
                                      .detail =
                                          "The upstream's answer is too large or coded; it cannot "
                                          "be turned into this route's object.",
                                      .state = "FAILED"};
                core::Fail failure{
                    .certainty = core::Certainty::unknown,
                    .failure = {.code = "answer-not-usable",
                                .message = problem.detail,
                                .http_status = static_cast<std::uint16_t>(attempt.status)}};
                co_await not_complete(attempt, std::move(failure), shape.on_problem(problem),
                                      problem);
                co_return;
            }
            pass();
        }
        if (passing) {
            // The latest bytes are held back: the last ones may leave only after the record says
            // that it is complete.
            if (!body.empty() && !journal.append(body)) response.cancel();
            attempt.flight->changed().notify();
            body.assign(piece);
        } else {
            body += piece;
        }
    }
    attempt.answered_upstream = true;
    if (passing) {
        co_await record(attempt, std::move(body));
        co_return;
    }
    const AnswerHead upstream_head = head;
    auto rendered = shape.on_answer(std::move(head), body);
    if (!rendered) {
        core::Fail failure{
            .certainty = core::Certainty::unknown,
            .failure = {.code = "answer-not-complete",
                        .message = "a success status with a body that is an error or no valid JSON",
                        .http_status = static_cast<std::uint16_t>(attempt.status)}};
        const Problem problem{.status = 502,
                              .slug = "upstream-nonsense",
                              .detail = "The upstream's answer is an error or not valid JSON.",
                              .state = "FAILED"};
        AnswerShape::Rendered passed = shape.on_failure(upstream_head, std::move(body));
        co_await not_complete(attempt, std::move(failure), std::move(passed), problem);
        co_return;
    }
    journal.set_head(std::move(rendered->head), false);
    co_await record(attempt, std::move(rendered->body));
}

Task<> Owner::pump_stream(Attempt& attempt, http::Response& response, AnswerHead head) {
    Flight& flight = *attempt.flight;
    Journal& journal = flight.journal();
    AnswerShape& shape = *attempt.call.shape;
    attempt.stream = true;
    journal.set_head(shape.stream_head(std::move(head)), true);
    flight.changed().notify();

    http::SseScanner scanner;
    std::string raw;              // from `raw_begin` on: bytes whose event has not ended yet
    std::uint64_t raw_begin = 0;  // position in the upstream's stream
    std::string out;              // judged, to be published with this read
    std::string tail;             // the terminal event and what follows it: leaves after the record
    bool terminal = false;
    bool error_event = false;
    const auto on_event = [&](const http::SseEvent& event) {
        base::fault_point("gateway.stream.event");
        const auto from =
            static_cast<std::size_t>(event.begin > raw_begin ? event.begin - raw_begin : 0);
        const auto to = static_cast<std::size_t>(event.end - raw_begin);
        const std::string_view bytes = std::string_view(raw).substr(from, to - from);
        if (terminal) {
            tail += shape.on_rest(bytes);
            return;
        }
        AnswerShape::Piece piece = event.oversized
                                       ? AnswerShape::Piece{.bytes = shape.on_rest(bytes)}
                                       : shape.on_event(bytes, event.type, event.data);
        error_event = error_event || piece.error;
        if (piece.terminal || piece.error) {
            // An error, too, ends the stream: its reader may ask again at once, and must not meet
            // this attempt then.
            terminal = true;
            tail += piece.bytes;
        } else {
            out += piece.bytes;
        }
    };
    runtime::TimerId end_timer = 0;
    std::optional<http::CallError> broke;
    for (;;) {
        auto read = co_await response.read_some();
        if (auto* error = std::get_if<http::CallError>(&read)) {
            broke = std::move(*error);
            break;
        }
        const std::string_view piece = std::get<std::string_view>(read);
        if (piece.empty()) break;
        raw += piece;
        scanner.feed(piece, on_event);
        const auto judged =
            static_cast<std::size_t>(std::max(scanner.event_begin(), raw_begin) - raw_begin);
        raw.erase(0, judged);
        raw_begin += judged;
        if (raw.size() > held_event_max_bytes) {
            (terminal ? tail : out) += shape.on_rest(raw);
            raw_begin += raw.size();
            raw.clear();
        }
        if (!out.empty()) {
            if (!journal.append(out)) response.cancel();
            out.clear();
            flight.changed().notify();
            if (journal.view().bytes > state_.config.record_max_bytes && !attempt.not_kept) {
                attempt.not_kept = true;
                state_.metrics.answers_not_kept.add();
            }
            co_await write_chunks(attempt, {}, std::nullopt);
        }
        if (terminal && end_timer == 0) {
            // All of the answer is here. The body's own end is waited for briefly, so that the
            // connection can be kept.
            Loop& loop = engine_.loop();
            end_timer =
                loop.at(loop.now() + end_after_terminal, [&response] { response.cancel(); });
        }
    }
    engine_.loop().cancel(end_timer);
    if (terminal && !error_event && (!broke || end_timer != 0)) {
        attempt.answered_upstream = true;
        tail += shape.on_rest(raw);
        co_await record(attempt, std::move(tail));
        co_return;
    }
    tail += shape.on_rest(raw);
    attempt.held_back = std::move(tail);
    core::Fail failure{.certainty = core::Certainty::unknown,
                       .failure = {.http_status = static_cast<std::uint16_t>(attempt.status)}};
    Problem problem{.status = 502, .retry_after_s = 1, .state = "FAILED"};
    if (!attempt.stopped.empty()) {
        failure.failure.code = attempt.stopped;
        failure.failure.message = "the call was given up in the middle of its stream";
        problem.slug = "call-cancelled";
    } else if (error_event) {
        failure.failure.code = "stream-error";
        failure.failure.message = "an error event in the upstream's stream";
        problem.slug = "upstream-failed";
    } else if (broke) {
        failure.failure.code = failure_code(broke->kind);
        failure.failure.message = broke->detail;
        problem = call_problem(*broke);
    } else {
        failure.failure.code = "stream-cut";
        failure.failure.message = "the upstream's stream ended without its terminal event";
        problem.slug = "upstream-cut";
    }
    if (problem.detail.empty())
        problem.detail =
            "The upstream's stream did not come to its end. Submit again with the same id.";
    co_await not_complete(attempt, std::move(failure), shape.on_problem(problem), problem);
}

Task<> Owner::take_failure(Attempt& attempt, http::Response& response, AnswerHead head) {
    std::string body;
    for (;;) {
        auto read = co_await response.read_some();
        if (const auto* error = std::get_if<http::CallError>(&read)) {
            if (provably_free(attempt.status)) {
                // The status has said it already: not processed. Only its words are lost.
                const Problem problem = call_problem(*error);
                core::Fail failure{
                    .certainty = core::Certainty::not_processed,
                    .failure = {.code = "upstream-status",
                                .message = status_text(attempt.status),
                                .http_status = static_cast<std::uint16_t>(attempt.status)}};
                co_await not_complete(attempt, std::move(failure),
                                      attempt.call.shape->on_problem(problem), problem);
            } else {
                co_await call_failed(attempt, *error);
            }
            co_return;
        }
        const std::string_view piece = std::get<std::string_view>(read);
        if (piece.empty()) break;
        if (body.size() + piece.size() > failure_body_max_bytes) {
            response.cancel();
            break;
        }
        body += piece;
    }
    core::Fail failure{.certainty = provably_free(attempt.status) ? core::Certainty::not_processed
                                                                  : core::Certainty::unknown,
                       .failure = {.code = "upstream-status",
                                   .message = status_text(attempt.status),
                                   .http_status = static_cast<std::uint16_t>(attempt.status)}};
    const Problem problem{.status = 502,
                          .slug = "upstream-failed",
                          .detail = status_text(attempt.status) + ".",
                          .state = "FAILED"};
    AnswerShape::Rendered rendered =
        attempt.call.shape->on_failure(std::move(head), std::move(body));
    if (attempt.call.route->on_failed == config::OnFailed::replay &&
        deterministic_refusal(attempt.status) &&
        rendered.body.size() <= core::inline_body_max_bytes) {
        failure.certainty = core::Certainty::refused_for_good;
        core::Answer answer;
        answer.http_status = static_cast<std::uint16_t>(rendered.head.status);
        answer.content_type = rendered.head.content_type;
        answer.headers = attempt.kept;
        answer.body_bytes = rendered.body.size();
        answer.body = std::make_shared<const std::string>(rendered.body);
        failure.answer = std::move(answer);
    }
    co_await not_complete(attempt, std::move(failure), std::move(rendered), problem);
}

Task<> Owner::call_failed(Attempt& attempt, const http::CallError& error) {
    Problem problem = call_problem(error);
    core::Fail failure{
        .certainty =
            error.maybe_processed ? core::Certainty::unknown : core::Certainty::not_processed,
        .failure = {.code = std::string(failure_code(error.kind)), .message = error.detail}};
    if (!attempt.stopped.empty()) failure.failure.code = attempt.stopped;
    AnswerShape::Rendered rendered = attempt.call.shape->on_problem(problem);
    co_await not_complete(attempt, std::move(failure), std::move(rendered), problem);
}

Task<> Owner::not_complete(Attempt& attempt, core::Fail failure, AnswerShape::Rendered rendered,
                           const Problem& problem) {
    if (attempt.lease->overtaken()) {
        attempt.tell_moved_on();
        co_return;
    }
    attempt.answered_upstream = true;  // nothing is left to stop
    failure.usage = attempt.usage();
    const core::RecordPtr after = co_await engine_.fail(*attempt.lease, std::move(failure));
    Journal& journal = attempt.flight->journal();
    if (journal.view().has_head) {
        const auto tail = attempt.call.shape->broken_tail(problem);
        attempt.tell(tail ? Journal::End::whole : Journal::End::cut,
                     attempt.held_back + tail.value_or(std::string{}));
        co_return;
    }
    if (after && after->status == core::Status::unknown) {
        const Problem held{.status = 409,
                           .slug = "outcome-unknown",
                           .detail =
                               "The upstream may have processed this request, and no usable answer "
                               "came. It is held until somebody "
                               "decides: semel record resolve " +
                               base::base64url(attempt.call.key.view()) +
                               " --as completed|failed|rerun",
                           .should_retry = false,
                           .intent = base::base64url(attempt.call.key.view()),
                           .state = "UNKNOWN"};
        rendered = attempt.call.shape->on_problem(held);
    }
    journal.set_head(std::move(rendered.head), false);
    attempt.tell(Journal::End::whole, rendered.body);
}

/// Part of the whole answer: what the journal holds, then `last`. False: the spill file cannot be
/// read.
bool Owner::read_answer(Attempt& attempt, std::string_view last, std::uint64_t offset,
                        std::size_t size, std::string& out) {
    Journal& journal = attempt.flight->journal();
    const std::uint64_t journaled = journal.view().bytes;
    out.clear();
    std::string part;
    while (out.size() < size && offset + out.size() < journaled) {
        journal.read(offset + out.size(), size - out.size(), part);
        if (part.empty()) return false;
        out += part;
    }
    if (out.size() < size)
        out += last.substr(static_cast<std::size_t>(offset + out.size() - journaled),
                           size - out.size());
    return true;
}

/// Writes the full chunks that the journal holds; with `until` all, at the end, trying again until
/// then. False: not all of them.
Task<bool> Owner::write_chunks(Attempt& attempt, std::string_view last,
                               std::optional<SteadyTime> until) {
    if (attempt.not_kept || (attempt.chunks_waiting && !until)) co_return false;
    const std::uint64_t total = attempt.flight->journal().view().bytes + last.size();
    if (!until && total <= core::inline_body_max_bytes) co_return true;
    std::string chunk;
    for (;;) {
        const std::uint64_t offset =
            std::uint64_t{attempt.chunks_written} * core::inline_body_max_bytes;
        const std::uint64_t left = total - std::min(offset, total);
        if (left == 0 || (!until && left < core::inline_body_max_bytes)) co_return true;
        const auto size =
            static_cast<std::size_t>(std::min<std::uint64_t>(left, core::inline_body_max_bytes));
        if (!read_answer(attempt, last, offset, size, chunk)) co_return false;
        const auto written =
            co_await engine_.put_chunk(*attempt.lease, attempt.chunks_written, chunk, until);
        if (written) {
            attempt.chunk_digest.update(chunk);
            ++attempt.chunks_written;
            continue;
        }
        attempt.chunks_waiting = true;
        const SteadyTime again = engine_.loop().now() + chunk_retry;
        if (!until || attempt.lease->overtaken() || again >= *until) co_return false;
        co_await engine_.loop().sleep_until(again);
    }
}

/// All chunks of an answer of `total` bytes of which not all could be written, and the digest of the
/// whole. `last` may be in the journal by now. Empty: the spill file cannot be read.
std::vector<std::string> Owner::unwritten_chunks(Attempt& attempt, std::string_view last,
                                                 std::uint64_t total, base::Digest& digest) {
    std::vector<std::string> chunks;
    base::Sha256 whole;
    for (std::uint64_t offset = 0; offset < total; offset += core::inline_body_max_bytes) {
        const auto size = static_cast<std::size_t>(
            std::min<std::uint64_t>(total - offset, core::inline_body_max_bytes));
        std::string chunk;
        if (!read_answer(attempt, last, offset, size, chunk)) return {};
        whole.update(chunk);
        chunks.push_back(std::move(chunk));
    }
    digest = whole.finish();
    return chunks;
}

Task<> Owner::record(Attempt& attempt, std::string last) {
    Journal& journal = attempt.flight->journal();
    core::Usage usage = attempt.usage();
    if (usage.input_tokens < 0 && usage.output_tokens < 0) {
        state_.metrics.usage_unknown.add();
    } else {
        const auto count = [this](telemetry::Tokens kind, std::int64_t tokens) {
            if (tokens > 0) state_.metrics.tokens(kind).add(static_cast<std::uint64_t>(tokens));
        };
        count(telemetry::Tokens::input, usage.input_tokens);
        count(telemetry::Tokens::output, usage.output_tokens);
        count(telemetry::Tokens::cached, usage.cached_tokens);
        count(telemetry::Tokens::reasoning, usage.reasoning_tokens);
    }
    core::Answer answer;
    answer.http_status = static_cast<std::uint16_t>(journal.head().status);
    answer.content_type = journal.head().content_type;
    answer.headers = attempt.kept;
    answer.stream = attempt.stream;
    answer.body_bytes = journal.view().bytes + last.size();
    if (answer.body_bytes > state_.config.record_max_bytes) attempt.not_kept = true;
    // The client waits for chunks and record together as long as for an answer without chunks.
    const SteadyTime until = engine_.loop().now() + engine_.options().record_patience;
    std::vector<std::string> chunks;
    if (!attempt.not_kept && answer.body_bytes > core::inline_body_max_bytes) {
        if (co_await write_chunks(attempt, last, until)) {
            answer.body_kind = core::BodyKind::chunks;
            answer.chunk_count = attempt.chunks_written;
            answer.body_digest = attempt.chunk_digest.finish();
        } else {
            // With the record, as soon as the store takes it: until then in the spool.
            chunks = unwritten_chunks(attempt, last, answer.body_bytes, answer.body_digest);
            answer.body_kind = core::BodyKind::chunks;
            answer.chunk_count = static_cast<std::uint32_t>(chunks.size());
            attempt.not_kept = chunks.empty();
            if (attempt.not_kept) state_.metrics.answers_not_kept.add();
        }
    }
    if (attempt.not_kept) {
        answer.body_kind = core::BodyKind::not_kept;
        answer.body_digest = {};
    } else if (answer.body_kind == core::BodyKind::inline_body) {
        std::string body;
        journal.read(0, core::inline_body_max_bytes, body);
        body += last;
        answer.body = std::make_shared<const std::string>(std::move(body));
    }
    const engine::Completion completion =
        co_await engine_.complete(*attempt.lease, std::move(answer), std::move(usage),
                                  attempt.call.shape->append(), std::move(chunks), until);
    switch (completion.kind) {
        case engine::Completion::Kind::recorded:
            base::fault_point("gateway.recorded");
            attempt.tell(Journal::End::whole, last, false,
                         completion.record ? completion.record->expires : core::StoreTime{});
            break;
        case engine::Completion::Kind::pending:
            state_.metrics.record_pending.add();
            attempt.tell(Journal::End::whole, last, true);
            break;
        case engine::Completion::Kind::overtaken:
            attempt.tell_moved_on();
            break;
    }
}

}  // namespace semel::gateway
