#include "consumer/strategies/failures.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <random>
#include <utility>

namespace semel::consumer {
namespace {

core::Nonce new_nonce() {
    core::Nonce nonce;
    const std::string random = base::random_bytes(nonce.bytes.size());
    std::memcpy(nonce.bytes.data(), random.data(), nonce.bytes.size());
    return nonce;
}

double random_share() {
    thread_local std::minstd_rand random{std::random_device{}()};
    return std::uniform_real_distribution<double>(0.0, 1.0)(random);
}

milliseconds until(core::StoreTime then, core::StoreTime now) {
    return std::max(std::chrono::ceil<milliseconds>(then - now), milliseconds{0});
}

std::uint32_t failed_runs(const core::Record& record) {
    const std::uint32_t free = record.uncharged_attempts + record.crashes_charged;
    return record.attempt > free ? record.attempt - free : 0;
}

DeadClass class_of(const std::string& code) {
    constexpr std::array classes{DeadClass::attempts, DeadClass::crashes,    DeadClass::fatal,
                                 DeadClass::mismatch, DeadClass::conflict,   DeadClass::unknown,
                                 DeadClass::decode,   DeadClass::missing_id, DeadClass::tombstone};
    const auto found = std::find_if(classes.begin(), classes.end(),
                                    [&](DeadClass one) { return code == name_of(one); });
    return found == classes.end() ? DeadClass::attempts : *found;
}

Dead dead_of(const core::Record& record, DeadClass why) {
    return {.why = why,
            .reason = record.failure.message,
            .failed_runs = failed_runs(record),
            .first_failure_ms = record.created.us / 1000,
            .generation = record.generation,
            .token = record.token,
            .letter_known = record.letter_published};
}

Verdict ill(const base::Error& error) {
    return Ill{"a failure cannot be written down: " + error.detail};
}

}  // namespace

bool abandoned(const core::RecordPtr& record, core::StoreTime at) {
    return record != nullptr && record->status == core::Status::processing &&
           record->lease_end <= at;
}

Verdict verdict_of(const core::RecordPtr& record, core::StoreTime at) {
    if (record == nullptr) return Busy{busy_again};
    switch (record->status) {
        case core::Status::processing:
            return Busy{std::max(until(record->lease_end, at), milliseconds{1})};
        case core::Status::completed:
            return Duplicate{};
        case core::Status::failed:
            if (record->due <= at) return Busy{busy_again};
            return Retry{.delay = until(record->due, at),
                         .reason = record->failure.message,
                         .charged = false};
        case core::Status::unknown:
            return dead_of(*record, DeadClass::unknown);
        case core::Status::dead:
            return dead_of(*record, class_of(record->failure.code));
    }
    SEMEL_ASSERT(false, "a record has one of the five statuses");
}

FailureNote::FailureNote(const FailureRules& rules, const Message& message, FailedRun run)
    : rules_(&rules), message_(&message), run_(std::move(run)) {}

core::Acquire FailureNote::acquire(std::uint32_t max_attempts) {
    nonce_ = new_nonce();
    return {.fingerprint = message_->fingerprint,
            .owner = rules_->owner,
            .nonce = nonce_,
            .lease = note_lease,
            .not_after = {std::numeric_limits<std::int64_t>::max()},
            .policy = {.kind = core::IntentKind::message,
                       .max_attempts = max_attempts,
                       .retention_completed = rules_->retention,
                       .retention_dead = rules_->retention_dead},
            .starts_call = true,
            .label = rules_->label,
            .tenant = {},
            .turn = nullptr};
}

std::vector<core::Operation> FailureNote::claim() {
    std::vector<core::Operation> steps;
    steps.emplace_back(acquire(0));
    steps.emplace_back(core::Get{});  // the counts that a grant does not tell
    return steps;
}

std::variant<std::vector<core::Operation>, Verdict> FailureNote::after_claim(Results answers) {
    if (!answers[0]) return ill(answers[0].error());
    const core::StoreTime at = answers[0]->at;
    const core::StoreOutcome& outcome = answers[0]->outcome;
    const auto* granted = std::get_if<core::Granted>(&outcome);
    if (granted == nullptr) {
        if (const auto* busy = std::get_if<core::InFlight>(&outcome)) return Busy{busy->remaining};
        if (const auto* early = std::get_if<core::NotDue>(&outcome))
            return Retry{.delay = early->remaining, .reason = run_.reason, .charged = false};
        if (const auto* done = std::get_if<core::Replay>(&outcome))
            return verdict_of(done->record, at);
        if (const auto* unknown = std::get_if<core::UnknownOutcome>(&outcome))
            return verdict_of(unknown->record, at);
        if (const auto* dead = std::get_if<core::Exhausted>(&outcome))
            return verdict_of(dead->record, at);
        if (std::holds_alternative<core::Mismatch>(outcome)) {
            if (rules_->mismatch_is_duplicate) return Duplicate{};
            return Dead{.why = DeadClass::mismatch,
                        .reason = "the id was used with another fingerprint",
                        .token = {}};
        }
        return Busy{busy_again};
    }
    if (!answers[1]) return ill(answers[1].error());
    const auto* found = std::get_if<core::Found>(&answers[1]->outcome);
    if (found == nullptr || found->record == nullptr) return Busy{busy_again};
    const std::uint32_t failed = std::max(failed_runs(*found->record), 1U);
    const auto wait = run_.for_good
                          ? std::nullopt
                          : rules_->retry.wait_after(failed, milliseconds{0}, random_share());
    std::vector<core::Operation> steps;
    steps.emplace_back(core::Fail{
        .token = granted->token,
        .nonce = nonce_,
        .certainty = core::Certainty::unknown,
        .failure = {.code = run_.for_good ? name_of(run_.dead) : run_.code, .message = run_.reason},
        .answer = {},
        .usage = {},
        .delay = wait.value_or(milliseconds{0})});
    if (wait) {
        next_ = Retry{.delay = *wait,
                      .reason = run_.reason,
                      .charged = true,
                      .step = rules_->retry.delay_after(failed)};
    } else {
        next_ = Dead{.why = run_.dead,
                     .reason = run_.reason,
                     .failed_runs = failed,
                     .first_failure_ms = granted->created.us / 1000,
                     .generation = granted->generation,
                     .token = granted->token};
        steps.emplace_back(acquire(1));  // one charged attempt is too many now: DEAD
    }
    return steps;
}

Verdict FailureNote::after_record(Results answers) {
    for (const auto& answer : answers) {
        if (!answer) return ill(answer.error());
    }
    // Somebody else took the record over meanwhile.
    if (!std::holds_alternative<core::Applied>(answers[0]->outcome)) return Busy{busy_again};
    if (answers.size() == 1) return next_;
    const auto* dead = std::get_if<core::Exhausted>(&answers[1]->outcome);
    if (dead == nullptr || dead->record == nullptr) return Busy{busy_again};
    std::get<Dead>(next_).token = dead->record->token;
    return next_;
}

}  // namespace semel::consumer
