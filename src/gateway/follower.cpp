#include "gateway/follower.hpp"

#include <algorithm>

#include "base/fault_point.hpp"
#include "base/json_scan.hpp"

namespace semel::gateway {

using namespace std::chrono_literals;
using Outcome = telemetry::RequestOutcome;

namespace {

/// How often a waiting connection is looked at for its client's having left.
constexpr auto client_look = 1s;
/// Bytes taken from a journal for one write.
constexpr std::size_t write_max_bytes = 64 * 1024;
/// One line, no blank line after it: decoders that end an event there would make an empty one of
/// it.
constexpr std::string_view heartbeat_line = ": semel\n";

/// Counts a joiner for as long as it follows.
class JoinerShown {
  public:
    explicit JoinerShown(telemetry::Gauge* gauge) : gauge_(gauge) {
        if (gauge_ != nullptr) gauge_->add();
    }
    ~JoinerShown() {
        if (gauge_ != nullptr) gauge_->sub();
    }
    JoinerShown(const JoinerShown&) = delete;
    JoinerShown& operator=(const JoinerShown&) = delete;

  private:
    telemetry::Gauge* gauge_;
};

constexpr std::string_view from_cache_false = "\"fromCache\":false";
constexpr std::string_view from_cache_true = "\"fromCache\":true";

}  // namespace

std::string rfc3339(core::StoreTime time) {
    // Howard Hinnant's days-to-civil: no locale, no time zone database, no lock.
    const std::int64_t seconds = time.us / 1'000'000;
    const std::int64_t days = seconds / 86'400;
    const std::int64_t rest = seconds % 86'400;
    const std::int64_t z = days + 719'468;
    const std::int64_t era = z / 146'097;
    const auto day_of_era = static_cast<unsigned>(z - era * 146'097);
    const unsigned year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36'524 - day_of_era / 146'096) / 365;
    const unsigned day_of_year =
        day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    const unsigned month_index = (5 * day_of_year + 2) / 153;
    const unsigned day = day_of_year - (153 * month_index + 2) / 5 + 1;
    const unsigned month = month_index < 10 ? month_index + 3 : month_index - 9;
    const auto year =
        static_cast<int>(static_cast<std::int64_t>(year_of_era) + era * 400 + (month <= 2 ? 1 : 0));
    std::string text = "0000-00-00T00:00:00Z";
    const auto put = [&text](std::size_t at, std::size_t digits, std::int64_t value) {
        for (std::size_t i = digits; i-- > 0; value /= 10)
            text[at + i] = static_cast<char>('0' + value % 10);
    };
    put(0, 4, year);
    put(5, 2, month);
    put(8, 2, day);
    put(11, 2, rest / 3600);
    put(14, 2, rest / 60 % 60);
    put(17, 2, rest % 60);
    return text;
}

std::string mark_from_cache(std::string_view body) {
    const auto at = body.rfind(from_cache_false);
    std::string out(body);
    if (at != std::string_view::npos) out.replace(at, from_cache_false.size(), from_cache_true);
    return out;
}

http::ResponseHead Follower::response_head(const Asked& asked, int status,
                                           std::string_view content_type,
                                           const Marks& marks) const {
    http::ResponseHead head{.status = status};
    head.headers.reserve(512);
    if (!content_type.empty()) head.add("Content-Type", content_type);
    head.add("Idempotency-Key", asked.id);
    head.add("Semel-Intent", base::base64url(asked.key.view()));
    if (marks.attempt != 0) head.add("Semel-Attempt", std::uint64_t{marks.attempt});
    if (!marks.outcome.empty()) head.add("Semel-Outcome", marks.outcome);
    head.headers += marks.replayed ? "X-Idempotent-Replayed: true\r\nIdempotent-Replayed: true\r\n"
                                   : "X-Idempotent-Replayed: false\r\n";
    if (marks.expires.us != 0) head.add("Idempotency-Expires", rfc3339(marks.expires));
    if (marks.pending) head.add("Semel-Record", "pending");
    head.headers += content_type.starts_with("text/event-stream")
                        ? "Cache-Control: no-store, no-transform\r\nX-Accel-Buffering: no\r\n"
                        : "Cache-Control: no-store\r\n";
    return head;
}

Task<> Follower::answer_problem(Asked& asked, Problem problem, Outcome outcome) {
    count(asked, outcome);
    problem.intent = base::base64url(asked.key.view());
    if (asked.chat) problem.request_id = asked.id;
    http::ResponseHead head =
        response_head(asked, problem.status, content_type_of(asked.shape), {});
    head.headers += header_lines(problem);
    head.add("Semel-Error-Source", "gateway");
    const std::string body = render(problem, asked.shape);
    co_await asked.exchange.respond(head, body);
}

Task<> Follower::mismatch(Asked& asked, std::vector<std::uint64_t> fields) {
    Problem problem{
        .status = 422, .slug = "key-reused", .should_retry = false, .safe_new_key = true};
    problem.differs = state_.fingerprints.names(fields, asked.body);
    problem.detail = "This id was used for another request";
    if (problem.differs.empty()) {
        problem.detail += " (it differs outside its body's top-level members)";
    } else {
        problem.detail += " (it differs in: ";
        for (std::size_t i = 0; i < problem.differs.size(); ++i) {
            if (i != 0) problem.detail += ", ";
            problem.detail += problem.differs[i];
        }
        problem.detail += ")";
    }
    problem.detail +=
        ". An id names one operation: retry with the same request, or use a new id for a new one.";
    co_await answer_problem(asked, std::move(problem), Outcome::mismatch);
}

Task<> Follower::still_running(Asked& asked, FlightPtr flight) {
    const auto running_for = std::chrono::duration_cast<std::chrono::microseconds>(
        engine_.loop().now() - flight->began());
    if (asked.chat && asked.route->on_running == config::OnRunning::accept) {
        count(asked, Outcome::accepted);
        http::ResponseHead head = response_head(asked, 202, "application/json", {});
        head.add("Location", asked.status_path);
        head.add("Retry-After", static_cast<std::uint64_t>(running_retry_after_s(running_for)));
        std::string body = "{\"requestId\":";
        base::append_json_string(body, asked.id);
        body +=
            R"(,"status":"PROCESSING","message":"The request is being processed; ask for its status."})";
        co_await asked.exchange.respond(head, body);
        co_return;
    }
    co_await answer_problem(asked,
                            {.status = 409,
                             .slug = "in-flight",
                             .detail = "The first request with this id is still running. Try again "
                                       "with the same id to get its answer.",
                             .retry_after_s = running_retry_after_s(running_for),
                             .should_retry = true,
                             .state = "PROCESSING"},
                            Outcome::in_flight);
}

Task<Follower::Followed> Follower::refusal(Asked& asked, FlightPtr flight, bool same) {
    const core::StoreOutcome& outcome = flight->refusal();
    if (const auto* replay_of = std::get_if<core::Replay>(&outcome)) {
        co_await replay(asked, replay_of->record);
        co_return Followed::answered;
    }
    // What follows was decided for the leader's fingerprint; another one must ask for itself.
    if (!same) co_return Followed::again;
    if (const auto* other = std::get_if<core::Mismatch>(&outcome)) {
        co_await mismatch(asked, other->fields);
    } else if (std::holds_alternative<core::InFlight>(outcome)) {
        co_await still_running(asked, flight);
    } else if (std::holds_alternative<core::UnknownOutcome>(outcome)) {
        Problem problem{.status = 409,
                        .slug = "outcome-unknown",
                        .detail =
                            "The upstream may have processed this request, and no usable answer "
                            "came. It is held until somebody decides: "
                            "semel record resolve " +
                            base::base64url(asked.key.view()) + " --as completed|failed|rerun",
                        .should_retry = false,
                        .state = "UNKNOWN"};
        co_await answer_problem(asked, std::move(problem), Outcome::unknown);
    } else if (std::holds_alternative<core::Exhausted>(outcome)) {
        co_await answer_problem(asked,
                                {.status = 409,
                                 .slug = "attempts-used-up",
                                 .detail = "All paid attempts that this route allows for one id "
                                           "are used up (max_paid_attempts).",
                                 .should_retry = false,
                                 .state = "FAILED"},
                                Outcome::attempts_used_up);
    } else {
        // NotDue and Late are no answers to an HTTP intent; the store should not give them.
        co_await answer_problem(
            asked,
            {.status = 503,
             .slug = "store-unavailable",
             .detail = "The store gave no usable answer; the upstream was not called. Try again.",
             .retry_after_s = 1,
             .should_retry = true},
            Outcome::unavailable);
    }
    co_return Followed::answered;
}

Task<Follower::Followed> Follower::follow(Asked& asked, FlightPtr flight, bool leads) {
    Loop& loop = engine_.loop();
    const Attachment attachment(flight, loop);
    if (!attachment.attached()) {
        co_await answer_problem(
            asked,
            {.status = 429,
             .slug = "too-many-waiters",
             .detail =
                 "Too many requests wait for this id already. Try again later with the same id.",
             .retry_after_s = 2,
             .should_retry = true},
            Outcome::unavailable);
        co_return Followed::answered;
    }
    const JoinerShown shown(leads ? nullptr : &state_.metrics.joiners);
    const bool same = leads || flight->fingerprint().matches(asked.fingerprint);
    for (;;) {
        const std::uint64_t seen = flight->changed().version();
        const Flight::Phase phase = flight->phase();
        if (!same && flight->admitted()) {
            co_await mismatch(asked,
                              core::differing_fields(flight->fingerprint(), asked.fingerprint));
            co_return Followed::answered;
        }
        const Journal::View view = flight->journal().view();
        // Whose call runs in another process joins it, like everybody else here.
        const bool first = leads && !flight->from_elsewhere();
        switch (phase) {
            case Flight::Phase::asking:
                break;
            case Flight::Phase::elsewhere:
            case Flight::Phase::running:
                if (!first && asked.route->on_running != config::OnRunning::join) {
                    co_await still_running(asked, flight);
                    co_return Followed::answered;
                }
                if (view.has_head && view.streaming)
                    co_return co_await send_stream(asked, flight, first);
                break;
            case Flight::Phase::refused:
                co_return co_await refusal(asked, flight, same);
            case Flight::Phase::broken:
                if (!same) co_return Followed::again;
                co_await answer_problem(asked, flight->problem(), Outcome::unavailable);
                co_return Followed::answered;
            case Flight::Phase::moved_on:
                co_return Followed::again;
            case Flight::Phase::done:
                if (view.streaming || view.end != Journal::End::whole)
                    co_return co_await send_stream(asked, flight, first);
                co_await send_whole(asked, flight, first);
                co_return Followed::answered;
        }
        // The request that caused the call waits for as long as its client does; a joiner is told
        // to come again in time.
        const SteadyTime until = first ? SteadyTime::max() : asked.wait_until;
        if (loop.now() >= until) {
            co_await still_running(asked, flight);
            co_return Followed::answered;
        }
        const bool notified =
            co_await flight->changed().wait(loop, seen, std::min(until, loop.now() + client_look));
        if (!notified && asked.exchange.client_gone()) {
            count(asked, Outcome::client_gone);
            co_return Followed::answered;
        }
    }
}

Task<> Follower::send_whole(Asked& asked, FlightPtr flight, bool leads) {
    Journal& journal = flight->journal();
    const AnswerHead& answer = journal.head();
    const Journal::View view = journal.view();
    Marks marks{.outcome = leads ? (flight->takeover() ? "taken-over" : "executed") : "joined",
                .replayed = !leads,
                .attempt = flight->attempt(),
                .expires = view.expires,
                .pending = view.record_pending};
    http::ResponseHead head = response_head(asked, answer.status, answer.content_type, marks);
    head.headers += answer.kept_headers;
    if (leads) head.headers += answer.live_headers;
    if (answer.from_gateway) head.add("Semel-Error-Source", "gateway");
    count(asked, answer.status >= 400 ? Outcome::upstream_failed
                 : !leads             ? Outcome::joined
                 : flight->takeover() ? Outcome::taken_over
                                      : Outcome::executed);
    if (const auto body = journal.body()) {
        if (asked.chat && !leads && !asked.as_recorded) {
            co_await asked.exchange.respond(head, mark_from_cache(*body));
        } else {
            co_await asked.exchange.respond(head, *body);
        }
        base::fault_point("gateway.answered");
        co_return;
    }
    asked.exchange.begin(head, view.bytes);
    std::string part;
    for (std::uint64_t at = 0; at < view.bytes; at += part.size()) {
        journal.read(at, write_max_bytes, part);
        if (part.empty()) {
            asked.exchange.cut();
            co_return;
        }
        if (!co_await asked.exchange.write(part)) co_return;
    }
    co_await asked.exchange.finish();
    base::fault_point("gateway.answered");
}

Task<Follower::Followed> Follower::send_stream(Asked& asked, FlightPtr flight, bool leads) {
    Loop& loop = engine_.loop();
    Journal& journal = flight->journal();
    if (!journal.view().has_head) {  // ended before it had one: nothing of this attempt was
                                     // promised to anyone
        co_return Followed::again;
    }
    const AnswerHead& answer = journal.head();
    const Marks marks{
        .outcome = leads ? (flight->takeover() ? "taken-over" : "executed") : "joined",
        .replayed = !leads,
        .attempt = flight->attempt()};
    http::ResponseHead head = response_head(asked, answer.status, answer.content_type, marks);
    head.headers += answer.kept_headers;
    if (leads) head.headers += answer.live_headers;
    count(asked, !leads               ? Outcome::joined
                 : flight->takeover() ? Outcome::taken_over
                                      : Outcome::executed);
    // Joined later than the first byte may have been overtaken meanwhile: then this client can
    // still get another attempt's.
    if (flight->phase() == Flight::Phase::moved_on) co_return Followed::again;
    asked.exchange.begin(head, answer.content_length);
    if (!co_await asked.exchange.write({})) co_return Followed::answered;  // the head alone
    const bool marks_tail = asked.chat && !leads && !asked.as_recorded;
    const auto heartbeat =
        answer.content_type.starts_with("text/event-stream") ? asked.route->heartbeat : 0ms;
    SteadyTime last_sent = loop.now();
    std::uint64_t at = 0;
    std::string part;
    for (;;) {
        const std::uint64_t seen = flight->changed().version();
        const Journal::View view = journal.view();
        if (at < view.bytes) {
            std::size_t max = write_max_bytes;
            if (marks_tail && view.end == Journal::End::whole) {
                // The closing event is changed as a whole, so it is read as a whole.
                max = static_cast<std::size_t>(at < view.last_at
                                                   ? std::min<std::uint64_t>(max, view.last_at - at)
                                                   : view.bytes - at);
            }
            journal.read(at, max, part);
            if (part.empty()) {
                asked.exchange.cut();
                co_return Followed::answered;
            }
            at += part.size();
            last_sent = loop.now();
            if (at == view.bytes && view.end == Journal::End::whole) {
                if (marks_tail) part = mark_from_cache(part);
                co_await asked.exchange.finish(part);
                base::fault_point("gateway.answered");
                co_return Followed::answered;
            }
            if (!co_await asked.exchange.write(part)) co_return Followed::answered;
            continue;
        }
        if (view.end == Journal::End::whole) {
            co_await asked.exchange.finish();
            co_return Followed::answered;
        }
        if (view.end == Journal::End::cut) {
            asked.exchange.cut();
            co_return Followed::answered;
        }
        SteadyTime wake = loop.now() + client_look;
        if (heartbeat > 0ms) wake = std::min(wake, last_sent + heartbeat);
        const bool notified = co_await flight->changed().wait(loop, seen, wake);
        if (notified) continue;
        if (asked.exchange.client_gone()) co_return Followed::answered;
        if (heartbeat > 0ms && loop.now() - last_sent >= heartbeat) {
            last_sent = loop.now();
            if (!co_await asked.exchange.write(heartbeat_line)) co_return Followed::answered;
        }
    }
}

Task<> Follower::replay(Asked& asked, core::RecordPtr record) {
    if (!record->fingerprint.matches(asked.fingerprint)) {
        co_await mismatch(asked, core::differing_fields(record->fingerprint, asked.fingerprint));
        co_return;
    }
    if (record->cancelled) {
        co_await answer_problem(asked,
                                {.status = 409,
                                 .slug = "cancelled",
                                 .detail = "This request was cancelled. Use a new id to ask again.",
                                 .should_retry = false,
                                 .state = "FAILED",
                                 .safe_new_key = true},
                                Outcome::not_kept);
        co_return;
    }
    if (!record->answer || record->answer->body_kind == core::BodyKind::not_kept) {
        co_await answer_problem(asked,
                                {.status = 409,
                                 .slug = "answer-not-kept",
                                 .detail = record->answer && record->answer->sealed_under != 0
                                               ? "The request was processed and paid for; its "
                                                 "answer was erased with its tenant's data, so it "
                                                 "cannot be given again."
                                               : "The request was processed and paid for; its "
                                                 "answer was too large to keep, so it cannot be "
                                                 "given again.",
                                 .should_retry = false,
                                 .state = "COMPLETED",
                                 .safe_new_key = false},
                                Outcome::not_kept);
        co_return;
    }
    const core::Answer& answer = *record->answer;
    const Marks marks{.outcome = "replayed",
                      .replayed = true,
                      .attempt = record->attempt,
                      .expires = record->expires};
    http::ResponseHead head = response_head(asked, answer.http_status, answer.content_type, marks);
    for (const auto& [name, value] : answer.headers) head.add(name, value);
    if (record->status == core::Status::failed)
        head.headers += "Semel-Error-Source: recorded\r\nx-should-retry: false\r\n";
    if (answer.body_kind == core::BodyKind::chunks) {
        co_await replay_chunks(asked, std::move(record), std::move(head));
        co_return;
    }
    count(asked, Outcome::replayed);
    if (asked.chat && !asked.as_recorded) {
        co_await asked.exchange.respond(head, mark_from_cache(*answer.body));
    } else {
        co_await asked.exchange.respond(head, *answer.body);
    }
}

Task<> Follower::replay_chunks(Asked& asked, core::RecordPtr record, http::ResponseHead head) {
    const core::Answer& answer = *record->answer;
    std::string chat_body;  // It is changed in one place, which may lie in any chunk.
    // The first reading only looks: while no head has left, there is still a status that says what
    // is missing. Nothing is kept of it, so that a replay's memory is one chunk.
    base::Sha256 looked_at;
    for (std::uint32_t n = 0; n < answer.chunk_count; ++n) {
        auto read =
            co_await engine_.ask({asked.key, core::GetChunk{record->token, n}}, record->tenant);
        if (!read) {
            co_await answer_problem(asked, store_problem(read.error()), Outcome::unavailable);
            co_return;
        }
        const auto* found = std::get_if<core::ChunkFound>(&read->outcome);
        if (found != nullptr) {
            looked_at.update(found->bytes);
            if (asked.chat) chat_body += found->bytes;
        }
        const bool last = n + 1 == answer.chunk_count;
        if (found == nullptr || (last && looked_at.finish() != answer.body_digest)) {
            co_await answer_problem(asked,
                                    {.status = 410,
                                     .slug = "expired",
                                     .detail = "The recorded answer is gone.",
                                     .should_retry = false,
                                     .state = "COMPLETED"},
                                    Outcome::not_kept);
            co_return;
        }
    }
    count(asked, Outcome::replayed);
    if (asked.chat) {
        co_await asked.exchange.respond(
            head, asked.as_recorded ? std::move(chat_body) : mark_from_cache(chat_body));
        co_return;
    }
    asked.exchange.begin(head, answer.body_bytes);
    base::Sha256 sent;
    for (std::uint32_t n = 0; n < answer.chunk_count; ++n) {
        auto read =
            co_await engine_.ask({asked.key, core::GetChunk{record->token, n}}, record->tenant);
        const auto* found = read ? std::get_if<core::ChunkFound>(&read->outcome) : nullptr;
        if (found != nullptr) sent.update(found->bytes);
        const bool last = n + 1 == answer.chunk_count;
        // It went between the two readings: never a short body that looks whole.
        if (found == nullptr || (last && sent.finish() != answer.body_digest)) {
            asked.exchange.cut();
            co_return;
        }
        if (last) {
            co_await asked.exchange.finish(found->bytes);
        } else if (!co_await asked.exchange.write(found->bytes)) {
            co_return;
        }
    }
}

}  // namespace semel::gateway
