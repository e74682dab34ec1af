// What is kept of messages that fail, where those that succeed need no record of their own: the
// steps on core's records, and what their answers mean. Pure, but for its random numbers.
#pragma once

#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/result.hpp"
#include "consumer/message.hpp"
#include "consumer/retry.hpp"
#include "consumer/verdict.hpp"
#include "core/store.hpp"

namespace semel::consumer {

struct FailureRules {
    RetryRules retry;
    core::Owner owner;
    std::string label;
    milliseconds retention{std::chrono::hours{24}};  ///< Of a record whose message has succeeded.
    milliseconds retention_dead{std::chrono::hours{24 * 30}};
    bool mismatch_is_duplicate = false;
};

/// One failed run.
struct FailedRun {
    DeadClass dead = DeadClass::attempts;  ///< Its class if it is given up.
    bool for_good = false;                 ///< Given up now.
    std::string code;                      ///< "failed", "not-yet".
    std::string reason;                    ///< For people; no payload.
};

/// Writes one failed run down, in two steps: claim() and its answers, then what after_claim() asks
/// for and its answers. A process that dies between them leaves a record whose lease runs out.
class FailureNote {
  public:
    using Results = std::span<const base::Result<core::Decided>>;

    FailureNote(const FailureRules& rules, const Message& message, FailedRun run);

    /// To be applied in this order; one answer each.
    std::vector<core::Operation> claim();
    /// The steps that follow; or the message's verdict, if it has another one.
    std::variant<std::vector<core::Operation>, Verdict> after_claim(Results answers);
    Verdict after_record(Results answers);

    [[nodiscard]] const Message& message() const { return *message_; }
    [[nodiscard]] const FailedRun& run() const { return run_; }

  private:
    [[nodiscard]] core::Acquire acquire(std::uint32_t max_attempts);

    const FailureRules* rules_;
    const Message* message_;
    FailedRun run_;
    core::Nonce nonce_;
    Verdict next_;  ///< Once the record says so.
};

/// What a record says of its message, at the store's time `at`.
Verdict verdict_of(const core::RecordPtr& record, core::StoreTime at);
/// A record whose owner died between the two steps of a note.
bool abandoned(const core::RecordPtr& record, core::StoreTime at);

/// Where nobody can say how long: ask again after this.
inline constexpr milliseconds busy_again{100};
/// Between the two steps of a note.
inline constexpr milliseconds note_lease{10'000};

}  // namespace semel::consumer
