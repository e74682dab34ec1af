#include "gateway/owner.hpp"

#include <algorithm>

#include "base/assert.hpp"
#include "base/fault_point.hpp"
#include "gateway/owner_attempt.hpp"
#include "http/sse.hpp"

namespace semel::gateway {

using namespace std::chrono_literals;

namespace {

/// Bytes of a stream held back because no event has ended yet; beyond, they pass unjudged.
constexpr std::size_t held_event_max_bytes = http::SseScanner::kEventMaxBytes;
/// After the terminal event the upstream may take this long to end its body, so that the connection
/// can be kept.
constexpr auto end_after_terminal = 250ms;

bool is_event_stream(std::string_view content_type) {
    constexpr std::string_view type = "text/event-stream";
    return content_type.size() >= type.size() &&
           http::name_is(content_type.substr(0, type.size()), type);
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

}  // namespace semel::gateway
