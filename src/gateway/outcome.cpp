// What becomes of a call: its answer or its failure is recorded, then its followers are told.
#include <algorithm>

#include "base/fault_point.hpp"
#include "gateway/owner_attempt.hpp"

namespace semel::gateway {

using namespace std::chrono_literals;

namespace {

/// Bodies of answers that are no success; a larger one is not passed on.
constexpr std::size_t failure_body_max_bytes = 4 * 1024 * 1024;
/// Between two tries to write a chunk of a big answer while the store is down.
constexpr auto chunk_retry = 500ms;

bool deterministic_refusal(int status) {
    return status == 400 || status == 404 || status == 413 || status == 415 || status == 422;
}

bool provably_free(int status) { return status < 500 || status == 503 || status == 529; }

std::string status_text(int status) { return "the upstream answered " + std::to_string(status); }

}  // namespace

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

/// All chunks of an answer of `total` bytes of which not all could be written, and the digest of
/// the whole. `last` may be in the journal by now. Empty: the spill file cannot be read.
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
